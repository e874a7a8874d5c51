"""The prefix cache: exact block ids, who may read what, and answers that are those of an engine without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fake_engines import fake_config, fake_core
from fakes import ScriptedRunner
from hamburger.engine.core.block_manager import BlockManager
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.messages import GroupOutput, StepOutputs, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.config import ModelConfig
from small_models import core_of, graft_config, params, random_model, tokens_of, trunk_config


def sequence(name: str, prompt: list[int], salt: str = "", **fields: Any) -> Sequence:
    return Sequence(SubmitRequest(name, prompt, SamplingParams(**fields), 0.0, cache_salt=salt), (), 1000)


def admit(blocks: BlockManager, s: Sequence, reserve: int) -> bool:
    """Let it in if it fits, as the scheduler does."""
    fits = blocks.fits(s, reserve)
    if fits:
        blocks.admit(s)
    return fits


def compute(blocks: BlockManager, *sequences: Sequence) -> None:
    """Pretend that all slots are in the pool."""
    for s in sequences:
        s.num_computed_slots = s.num_slots
        blocks.mark_computed(s, s.num_computed_slots)
        blocks.check_integrity()


def emit(s: Sequence, *groups: list[int]) -> None:
    s.scheduled_time = 0.0
    for group in groups:
        s.accept(group, [0.0] * len(group), None)


def cached(num_blocks: int) -> BlockManager:
    return BlockManager(num_blocks, 4, prefix_cache=True)


def test_exact_block_ids() -> None:
    blocks = cached(8)
    a, b, c = sequence("a", list(range(11))), sequence("b", [*range(8), 90, 91]), sequence("c", [5, *range(8)])
    assert admit(blocks, a, 0)
    assert (a.block_ids, a.num_computed_slots) == ([0, 1, 2], 0)
    compute(blocks, a)
    assert admit(blocks, b, 0)  # two blocks are a's, and a's third is not full
    assert (b.block_ids, b.num_computed_slots) == ([0, 1, 3], 8)
    assert admit(blocks, c, 0)  # the same tokens elsewhere are something else
    assert (c.block_ids, c.num_computed_slots) == ([4, 5, 6], 0)
    compute(blocks, b, c)
    assert blocks.used_slots == 7 * 4
    blocks.free(a)
    assert (blocks.num_free_blocks, blocks.used_slots) == (2, 24)  # 2 and 7: the others are held
    blocks.free(b)
    blocks.check_integrity()
    again = sequence("again", list(range(12)))
    assert admit(blocks, again, 0)  # idle blocks are found; new ones are the lowest free
    assert (again.block_ids, again.num_computed_slots) == ([0, 1, 2], 8)


def test_the_last_slot_is_always_computed() -> None:
    blocks = cached(8)
    a = sequence("a", list(range(8)))
    admit(blocks, a, 0)
    compute(blocks, a)
    for length, found in ((8, 4), (9, 8), (5, 4), (4, 0)):
        b = sequence("b", list(range(length)))
        assert admit(blocks, b, 0)
        assert b.num_computed_slots == found
        blocks.free(b)


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    blocks = cached(6)
    old, new = sequence("old", list(range(9))), sequence("new", list(range(20, 29)))
    for s in (old, new):
        assert admit(blocks, s, 0)
        compute(blocks, s)
        blocks.free(s)
    # old: 0, 1 idle, 2 free; new: 2, 3 idle, 4 free
    assert blocks.num_free_blocks == 6
    assert admit(blocks, big := sequence("big", list(range(50, 62))), 0)
    assert big.block_ids == [4, 5, 1]  # the free ones, then the end of the oldest chain
    assert admit(blocks, o := sequence("o", list(range(9))), 0) is True
    assert (o.block_ids[:1], o.num_computed_slots) == ([0], 4)
    blocks.check_integrity()


def test_an_admission_that_fails_changes_nothing() -> None:
    blocks = cached(4)
    a = sequence("a", list(range(9)))
    admit(blocks, a, 0)
    compute(blocks, a)
    before = (blocks.num_free_blocks, blocks.used_slots)
    b = sequence("b", list(range(17)))
    assert not admit(blocks, b, 0)
    assert (b.block_ids, b.num_computed_slots) == ([], 0)
    assert not admit(blocks, sequence("c", list(range(9))), 1)
    assert (blocks.num_free_blocks, blocks.used_slots) == before
    blocks.check_integrity()


def test_only_the_same_salt_reads() -> None:
    blocks = cached(9)
    a = sequence("a", list(range(9)), "tenant")
    admit(blocks, a, 0)
    compute(blocks, a)
    for salt, found in (("tenant", 8), ("", 0), ("other", 0)):
        b = sequence("b", list(range(9)), salt)
        admit(blocks, b, 0)
        assert b.num_computed_slots == found
        blocks.free(b)


def test_merged_and_single_slots_of_the_same_tokens_never_meet() -> None:
    blocks = cached(20)
    a = sequence("a", [1, 2, 3])
    emit(a, [4, 5], [6], [7, 8, 9], [10])
    admit(blocks, a, 0)
    compute(blocks, a)  # slots 1 2 3 (4 5) | (6) (7 8 9) (10)
    b = sequence("b", list(range(1, 11)))
    admit(blocks, b, 0)
    assert b.num_computed_slots == 0
    c = sequence("c", [1, 2, 3])
    emit(c, [4], [5], [6], [7, 8, 9], [10])
    admit(blocks, c, 0)
    assert c.num_computed_slots == 0
    d = sequence("d", [1, 2, 3])
    emit(d, [4, 5], [6])
    admit(blocks, d, 0)
    assert d.num_computed_slots == 4


def test_prompts_that_are_scored_read_nothing_until_they_are() -> None:
    blocks = cached(20)
    a = sequence("a", list(range(9)))
    admit(blocks, a, 0)
    compute(blocks, a)
    b = sequence("b", list(range(9)), prompt_logprobs=0)
    admit(blocks, b, 0)
    assert b.num_computed_slots == 0
    blocks.free(b)
    b.prompt_logprobs = [None] * 9  # as after a preemption
    admit(blocks, b, 0)
    assert b.num_computed_slots == 8


def test_without_the_cache_nothing_is_found() -> None:
    blocks = BlockManager(8, 4)
    a, b = sequence("a", list(range(9))), sequence("b", list(range(9)))
    admit(blocks, a, 0)
    compute(blocks, a)
    admit(blocks, b, 0)
    assert (b.block_ids, b.num_computed_slots) == ([3, 4, 5], 0)


def run(core: EngineCore, heard: Callable[[StepOutputs], None] = lambda step: None) -> dict[str, list[GroupOutput]]:
    answers: dict[str, list[GroupOutput]] = {}
    while core.has_work:
        step = core.step()
        core.check_integrity()
        heard(step)
        for output in step.outputs:
            answers.setdefault(output.request_id, []).append(output)
    return answers


def test_a_replay_finds_its_own_blocks_and_a_request_is_told_what_was_cached() -> None:
    queries: list[tuple[int, int]] = []

    def heard(step: StepOutputs) -> None:
        assert step.stats is not None
        if step.stats.cache_queries:
            queries.append((step.stats.cache_queries, step.stats.cache_hits))

    core = fake_core(ScriptedRunner(eos_chance=0), fake_config(prefix_cache=True), lambda: 0.0)
    sampling = SamplingParams(seed=0, max_tokens=8, ignore_eos=True)
    for name in ("a", "b"):
        core.add(SubmitRequest(name, list(range(10)), sampling, 0.0))
        [outputs] = run(core, heard).values()
        assert [o.cached_slots for o in outputs] == [0 if name == "a" else 8] + [0] * (len(outputs) - 1)
    assert queries == [(10, 0), (10, 8)]


@pytest.mark.parametrize("confidence", [0.3, 1.0])
def test_texts_stay_with_a_real_model(confidence: float) -> None:
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()), seed=3)
    generator = torch.Generator().manual_seed(0)
    beginning = torch.randint(2, 96, (37,), generator=generator).tolist()
    prompts = {str(i): [*beginning[: 8 + 7 * i], i] for i in range(5)}
    first = core_of(model, prefix_cache=True)
    plain = core_of(model)
    for sampling in (
        params(confidence=confidence, max_tokens=20),
        params(temperature=0.8, seed=4, confidence=confidence),
    ):
        for name, prompt in prompts.items():
            wanted: list[list[int]] = []
            found: list[list[int]] = []
            for core, texts in ((plain, wanted), (first, found)):
                core.add(SubmitRequest(name, prompt, sampling, 0.0))
                texts.append(tokens_of(run(core)[name]))
            assert found == wanted
