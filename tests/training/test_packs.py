"""Packing and regrouping: nothing is lost, nothing is random but by seed and epoch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hamburger.training.batches.packs import Examples, Pack, Packer, PackStream
from hamburger.training.errors import TrainingError
from hamburger.training.recipe import Grouping
from small_models import trunk_config
from training_runs import MadeRecord, MadeSource, random_source, recipe

JITTER = Grouping(kind="jitter", split=0.5)


def contents(packs: list[Pack]) -> list[list[tuple[str, list[int]]]]:
    return [[(e.id, g.tolist()) for e, g in zip(p.examples, p.groups, strict=True)] for p in packs]


@settings(max_examples=30)
@given(
    number=st.integers(1, 12),
    slots=st.integers(1, 60),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
    grouping=st.sampled_from([Grouping(), JITTER, Grouping(kind="single"), Grouping(kind="jitter", single_share=0.5)]),
)
def test_an_epoch_holds_every_example_once(number: int, slots: int, seed: int, epoch: int, grouping: Grouping) -> None:
    examples = Examples([random_source(number)])
    packs = Packer(examples, 4, slots, seed).epoch(grouping, epoch)
    assert sorted(e.id for p in packs for e in p.examples) == sorted(e.id for e in examples)
    assert all(p.num_slots <= slots or len(p.examples) == 1 for p in packs)
    for pack in packs:
        for example, groups in zip(pack.examples, pack.groups, strict=True):
            first = groups.nonzero()[:, 0]
            sizes = groups[first].long()
            assert sizes.max() <= 4
            # The groups tile the tokens, and only answers are composed.
            assert (first + sizes).tolist() == [*first[1:].tolist(), len(groups)]
            assert bool(example.response[groups != 1].all())


def test_the_same_seed_and_epoch_give_the_same_packs() -> None:
    examples = Examples([random_source(9)])
    first, again = (contents(Packer(examples, 4, 30, 7).epoch(JITTER, 2)) for _ in range(2))
    assert first == again
    assert contents(Packer(examples, 4, 30, 7).epoch(JITTER, 3)) != first
    assert contents(Packer(examples, 4, 30, 8).epoch(JITTER, 2)) != first


def test_jitter_cuts_groups_and_moves_thresholds() -> None:
    examples = Examples([random_source(30)])

    def slots(grouping: Grouping) -> int:
        return sum(p.num_slots for p in Packer(examples, 4, 10**6, 0).epoch(grouping, 0))

    whole = Grouping(kind="jitter", ratio=(0.7, 0.7), floor=(0.3, 0.3), split=0)
    strict = Grouping(kind="jitter", ratio=(0.1, 0.1), floor=(0.0, 0.0), split=0)
    assert slots(whole) < slots(whole.model_copy(update={"split": 1.0})) < slots(Grouping(kind="single"))
    assert slots(whole) < slots(strict)


def test_a_share_of_the_answers_keeps_the_datas_groups() -> None:
    examples = Examples([random_source(60)])
    own = {e.id: e.group_sizes.tolist() for e in examples}
    grouping = Grouping(kind="jitter", ratio=(0, 0), floor=(0, 0), data_share=0.4)  # jitter makes groups of one
    [pack] = Packer(examples, 4, 10**6, 0).epoch(grouping, 0)
    composed = {e.id: groups.tolist() for e, groups in zip(pack.examples, pack.groups, strict=True) if groups.max() > 1}
    assert all(groups == own[id] for id, groups in composed.items())
    could_be = sum(max(groups) > 1 for groups in own.values())
    assert 0.25 < len(composed) / could_be < 0.6


def test_a_share_of_the_packs_is_unmerged() -> None:
    examples = Examples([random_source(60)])
    packs = Packer(examples, 4, 10, 0).epoch(Grouping(single_share=0.4), 0)
    composed = [any(int(g.max()) > 1 for g in p.groups) for p in packs]
    assert 0.25 < 1 - sum(composed) / len(composed) < 0.6


def test_a_stream_goes_over_epochs_and_starts_anywhere() -> None:
    packer = Packer(Examples([random_source(7)]), 4, 20, 0)
    per_epoch = [len(packer.epoch(JITTER, epoch)) for epoch in range(4)]
    stream = PackStream(packer, JITTER, 2)
    assert stream.steps(3) == round(3 * per_epoch[0] / 2)
    steps = [stream.packs(step) for step in range(sum(per_epoch) // 2)]
    flat = [pack for packs in steps for pack in packs]
    expected = [pack for epoch in range(4) for pack in packer.epoch(JITTER, epoch)]
    assert contents(flat) == contents(expected[: len(flat)])
    later = PackStream(packer, JITTER, 2)
    assert contents(later.packs(len(steps) - 1)) == contents(steps[-1])


def test_examples_without_a_trained_token_are_left_out() -> None:
    none = MadeRecord("none", torch.ones(3).int(), torch.zeros(3).bool(), torch.ones(3).byte(), torch.zeros(3))
    first = MadeRecord("first", torch.ones(3).int(), torch.arange(3) == 0, torch.ones(3).byte(), torch.zeros(3))
    examples = Examples([MadeSource([none, first, *random_source(2).records])], lambda id: id != "r1")
    assert [e.id for e in examples] == ["r0"]


@pytest.mark.parametrize("size", [1, 20])
def test_the_short_list_holds_what_answers_hold(size: int) -> None:
    examples = Examples([random_source(5, teacher_k=0)])
    counted = torch.zeros(96, dtype=torch.int64)
    for e in examples:
        counted += torch.bincount(e.token_ids[e.response].long(), minlength=96)
    chosen = examples.likeliest_ids(size, 96)
    assert counted[chosen].min() >= counted.topk(size).values.min()
    assert chosen.tolist() == sorted(set(chosen.tolist()))


def test_data_sets_with_other_numbers_of_likeliest_tokens_are_refused(tmp_path: Path) -> None:
    both = Examples([random_source(3, teacher_k=4), random_source(3, teacher_k=8)])
    with pytest.raises(TrainingError, match=r"hold \[4, 8\] likeliest tokens a position"):
        both.check(recipe(tmp_path), trunk_config())


def test_with_cached_states_only_the_slots_that_run_fill_a_pack() -> None:
    examples = Examples([random_source(60)])
    packs = Packer(examples, 4, 30, 0, cached_states=True).epoch(Grouping(kind="single"), 0)
    assert sorted(e.id for p in packs for e in p.examples) == sorted(e.id for e in examples)
    assert all(p.num_response_tokens <= 30 or len(p.examples) == 1 for p in packs)
    sizes = [(p.num_response_tokens, int(q.examples[0].response.sum())) for p, q in pairwise(packs)]
    assert all(size + next_size > 30 for size, next_size in sizes)


def test_the_base_s_likeliest_tokens_need_the_vocabulary_too() -> None:
    [record] = random_source(1).records
    assert record.top_ids is not None
    beyond = replace(record, top_ids=torch.full_like(record.top_ids, 96))
    with pytest.raises(TrainingError, match="the data has the token id 96, the model only ids below 96"):
        Examples([MadeSource([beyond])]).check(recipe(Path()), trunk_config(vocab_size=96, num_layers=2))


def test_examples_are_told_from_others() -> None:
    records = random_source(3).records
    single = replace(records[0], group_sizes=torch.ones_like(records[0].group_sizes))
    changed = replace(records[0], token_ids=records[0].token_ids + 1)
    sets = [records, records[::-1], records[:2], [single, *records[1:]], [changed, *records[1:]]]
    assert len({Examples([MadeSource(made)]).fingerprint for made in sets}) == len(sets)
    parts = [MadeSource(records[:1]), MadeSource(records[1:])]
    assert Examples(parts).fingerprint == Examples([MadeSource(records)]).fingerprint
