"""Answers -> data set, with a scorer whose entropies are known by hand and with a real one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from fakes import EOS, ByteTokenizer
from hamburger.model.config import ModelConfig
from hamburger.training.corpus.answers import WrittenAnswer
from hamburger.training.corpus.dataset import DatasetMeta, SegmentedDataset
from hamburger.training.corpus.prompts import is_held_out
from hamburger.training.corpus.segmentation import segment
from hamburger.training.errors import TrainingError
from hamburger.training.forward.scoring import Scorer, TokenScores
from hamburger.training.prepare.group_report import allowed, group_report
from hamburger.training.prepare.segment import Tally, group_sizes, segment_answers, state_layers
from small_models import plain_model, trunk_config
from training_runs import dataset_meta

META = dataset_meta(vocab_size=259)


class FakeScorer:
    """The entropy of a token is its id / 100; its rivals are the next ids. fail_at: the call (from 1) that fails."""

    max_length = 60

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.calls = 0

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], top_k: int, state_layers: tuple[int, ...]
    ) -> list[TokenScores]:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("scripted failure")
        assert all(len(ids) <= self.max_length for ids in sequences)
        return [
            self._one(torch.tensor(list(ids)[start:]), top_k, len(state_layers))
            for ids, start in zip(sequences, starts, strict=True)
        ]

    def _one(self, ids: torch.Tensor, k: int, layers: int) -> TokenScores:
        top = (ids[:, None] + torch.arange(k)) % 259
        states = (ids[:, None, None] + torch.zeros(layers, 2)).bfloat16()
        return TokenScores(-ids / 50, ids / 100, top.int(), (-top / 10).half(), states)


def answer(id: str, token_ids: Sequence[int], prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> WrittenAnswer:
    user = [{"role": "user", "content": "x"}]
    written = WrittenAnswer(id, 0, None, user, "", list(prompt), list(token_ids), "stop", f"answers, {id}")
    return replace(written, **changes)


def add(folder: Path, *answers: WrittenAnswer, meta: DatasetMeta = META, **options: Any) -> Tally:
    scorer = options.pop("scorer", FakeScorer())
    return segment_answers(scorer, ByteTokenizer(), answers, folder, meta, end_token_ids=(EOS,), **options)


def test_states_are_kept_for_the_trained_tokens(tmp_path: Path) -> None:
    add(tmp_path, answer("a", [20, 30, EOS]), meta=replace(META, state_layers=(3, 7)))
    dataset = SegmentedDataset(tmp_path)
    assert dataset.meta.state_layers == (3, 7)
    states = dataset.example(0).states
    assert states is not None
    assert states.shape == (3, 2, 2)
    assert states[:, 0, 0].tolist() == [20, 30, torch.tensor(EOS).bfloat16().item()]
    with pytest.raises(TrainingError, match="state_layers"):
        add(tmp_path, answer("b", [20, EOS]))


def test_the_layers_of_states_are_counted_or_named() -> None:
    assert state_layers(0, 30) == ()
    assert state_layers(3, 30) == (9, 19, 29)
    assert state_layers((7, 14, 29), 30) == (7, 14, 29)
    with pytest.raises(TrainingError, match=r"layer 30, but the model's are 0\.\.29"):
        state_layers((7, 30), 30)
    with pytest.raises(TrainingError, match="31 feature layers"):
        state_layers(31, 30)


def test_an_example_is_scored_and_grouped(tmp_path: Path) -> None:
    ids = [200, 50, 10, 2, 1, 100, EOS]
    add(tmp_path, answer("a", ids))
    example = SegmentedDataset(tmp_path).example(0)
    assert example.id == "a"
    assert example.token_ids.tolist() == [1, 2, 3, *ids]
    assert example.response.tolist() == [False] * 3 + [True] * 7
    assert example.entropy.tolist() == pytest.approx([0, 0, 0, *(i / 100 for i in ids)])
    assert example.group_sizes.tolist() == [1, 1, 1, 4, 0, 0, 0, 1, 1, 1]
    assert example.top_ids is not None
    assert example.top_ids.tolist() == [[i, (i + 1) % 259] for i in ids]
    assert example.top_logprobs is not None
    assert example.top_logprobs[0].tolist() == pytest.approx([-20.0, -20.1], abs=0.01)


def test_every_turn_of_a_conversation_is_segmented_by_itself(tmp_path: Path) -> None:
    response = [0, 0, 1, 1, 0, 1, 1, 1]
    entropies = [0.0, 0.0, 2.0, 0.01, 0.0, 0.01, 0.01, 3.0]
    assert group_sizes(entropies, response, META).tolist() == [1, 1, 2, 0, 1, 2, 0, 1]


def test_rows_are_those_of_the_trained_tokens_only(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b<eos>"},
        {"role": "user", "content": "c"},
    ]
    both = answer("a", [100, EOS], messages=turns, prompt_ids=None)
    add(tmp_path, both, meta=replace(META, train_on="all"))
    example = SegmentedDataset(tmp_path).example(0)
    trained = example.token_ids[example.response]
    assert trained.tolist() == [ord("b"), EOS, 100, EOS]
    assert example.top_ids is not None
    assert example.top_ids[:, 0].tolist() == trained.tolist()
    assert example.entropy[~example.response].abs().max() == 0
    assert len(SegmentedDataset(tmp_path).example(0).token_ids) == len(example.token_ids)


def test_a_run_that_was_killed_goes_on_after_its_last_part(tmp_path: Path) -> None:
    answers = [answer(f"p{i}", [i + 10, EOS]) for i in range(7)]
    with pytest.raises(RuntimeError, match="scripted failure"):
        add(tmp_path / "a", *answers, part_size=2, scorer=FakeScorer(fail_at=3))
    assert [e.id for e in SegmentedDataset(tmp_path / "a").examples()] == ["p0", "p1", "p2", "p3"]
    tally = add(tmp_path / "a", *answers, part_size=2)
    assert (tally.found, tally.added) == (4, 3)
    add(tmp_path / "whole", *answers, part_size=2)
    paths = sorted((tmp_path / "whole").glob("part-*"))
    assert len(paths) == len(list((tmp_path / "a").glob("part-*"))) == 4
    for path in paths:
        whole, resumed = load_file(path), load_file(tmp_path / "a" / path.name)
        assert all(torch.equal(whole[name], resumed[name]) for name in whole | resumed)


def test_answers_that_came_later_are_added(tmp_path: Path) -> None:
    first = [answer(f"p{i}", [i + 10, EOS]) for i in range(3)]
    add(tmp_path, *first)
    tally = add(tmp_path, answer("new", [9, EOS]), *first, answer("p0", [77, EOS]))
    assert (tally.found, tally.added) == (3, 2)
    assert [e.id for e in SegmentedDataset(tmp_path).examples()] == ["p0", "p1", "p2", "new", "p0"]
    idle = add(tmp_path, *first, scorer=FakeScorer(fail_at=1))
    assert idle.added == 0


def test_the_same_text_counts_once(tmp_path: Path) -> None:
    tally = add(tmp_path, answer("a", [9, EOS]), answer("b", [9, EOS]), answer("c", [9, EOS], prompt=[1, 2]))
    assert (tally.added, tally.twice) == (2, 1)


def test_held_out_prompts_never_enter(tmp_path: Path) -> None:
    answers = [answer(f"p{i}", [10 + i, EOS]) for i in range(40)]
    meta = replace(META, held_out=0.3)
    tally = add(tmp_path, *answers, meta=meta)
    kept = {f"p{i}" for i in range(40) if not is_held_out(f"p{i}", 0.3)}
    assert {e.id for e in SegmentedDataset(tmp_path).examples()} == kept
    assert tally.held_out == 40 - len(kept) > 0


@pytest.mark.parametrize(("handling", "length"), [("drop", None), ("cut", 16), ("keep", 49)])
def test_looping_answers(tmp_path: Path, handling: str, length: int | None) -> None:
    circle = [*list(range(100, 116)) * 3, EOS]
    meta = replace(META, loops=handling)
    tally = add(tmp_path, answer("loop", circle), answer("fine", [9, EOS]), meta=meta)
    lengths = {e.id: e.num_response_tokens for e in SegmentedDataset(tmp_path).examples()}
    assert lengths == ({"fine": 2} if length is None else {"fine": 2, "loop": length})
    assert (tally.repetitive_dropped, tally.repetitive_cut) == (int(handling == "drop"), int(handling == "cut"))


def test_long_conversations_are_cut_or_left_out(tmp_path: Path) -> None:
    long = answer("long", range(100, 190))
    tally = add(tmp_path / "a", long, answer("prompt", [9, EOS], prompt=[5] * 64))
    assert [len(e.token_ids) for e in SegmentedDataset(tmp_path / "a").examples()] == [60]  # the scorer's limit
    assert (tally.shortened, tally.too_long, tally.added) == (1, 1, 1)
    add(tmp_path / "b", long, meta=replace(META, max_length=20))
    assert [len(e.token_ids) for e in SegmentedDataset(tmp_path / "b").examples()] == [20]


def test_ids_of_another_vocabulary_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"answers, a has the token id 259, .* 0\.\.258: .*--model"):
        add(tmp_path, answer("a", [259]))


def test_no_teacher_is_kept_when_none_is_asked_for(tmp_path: Path) -> None:
    add(tmp_path, answer("a", [9, EOS]), meta=replace(META, top_k=0))
    assert SegmentedDataset(tmp_path).example(0).top_ids is None


def test_a_real_model_scores(tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(vocab_size=259, eos_token_ids=(EOS,)), graft=None)
    scorer = Scorer(plain_model(config), 512)
    answers = [answer(f"p{i}", [(7 * i + 31 * j) % 256 for j in range(5 + i)] + [EOS]) for i in range(9)]
    meta = replace(META, top_k=3, ratio=0.9)
    tally = add(tmp_path, *answers, meta=meta, scorer=scorer, part_size=4)
    dataset = SegmentedDataset(tmp_path)
    assert (tally.added, len(dataset)) == (9, 9)
    for example, written in zip(dataset.examples(), answers, strict=True):
        [scores] = scorer.score([[1, 2, 3, *(written.token_ids or ())]], [3], 3)
        assert torch.allclose(example.entropy[3:], scores.entropies, atol=1e-5)
        assert example.top_ids is not None
        assert torch.equal(example.top_ids, scores.top_ids)
        sizes = example.group_sizes[3:]
        assert sizes[sizes > 0].tolist() == segment(example.entropy[3:].tolist(), "decreasing_v2", ratio=0.9)


def test_the_report_counts_groups(tmp_path: Path) -> None:
    add(tmp_path, answer("a", [200, 50, 10, 2, 1, 100, EOS]), answer("b", [200, 50, EOS]))
    text = io.StringIO()
    Console(file=text, width=100).print(group_report(SegmentedDataset(tmp_path)))
    # a: 4 + 1 + 1 + 1 tokens, b: 2 + 1
    assert "2 examples, 10 response tokens in 6 groups: 1.667 tokens per KV by decreasing_v2." in text.getvalue()
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["1", "4", "66.7%", "█" * 27] in lines
    assert ["2", "1", "16.7%", "█" * 7] in lines
    assert ["3", "0", "0.0%"] in lines
    assert ["4", "1", "16.7%", "█" * 7] in lines
    assert ["sliding", "2.00"] in lines
    assert "mean 1.13, median 1.00" in text.getvalue()


def test_an_empty_data_set_has_an_empty_report(tmp_path: Path) -> None:
    add(tmp_path)
    text = io.StringIO()
    Console(file=text).print(group_report(SegmentedDataset(tmp_path)))
    assert text.getvalue() == "The data set has no example.\n"


def test_what_the_data_allow() -> None:
    answers = [[2.0, 0.1, 0.1], [2.0, 1.0]]
    rows = allowed(answers, 4, 259, [("decreasing", 0.3, 0.0), ("decreasing", 0.6, 0.0)])
    assert [row.tokens_per_kv for row in rows] == [pytest.approx(5 / 3), pytest.approx(5 / 2)]


def test_the_tally_says_what_was_left_out(tmp_path: Path) -> None:
    tally = add(tmp_path, answer("a", [9, EOS]), answer("b", [9, EOS]))
    assert tally.lines() == ["1 answers added.", "1 came twice, word for word."]


def test_progress_shows_answers_and_speed(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    add(tmp_path, *(answer(f"p{i}", [9 + i, EOS]) for i in range(3)), console=console)
    assert "3/3" in text.getvalue()
    assert "tokens/s" in text.getvalue()
