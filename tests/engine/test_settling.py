"""Settled slots in the core: when chunks settle, which blocks come free, and that drafts and replays change nothing."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.messages import AbortRequest, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.engine.types.settling import Settling
from playing import play
from verified import ScriptedTrunk, VerifyingRunner, drafts_of, verified_config, verified_core

SMALL = Settling(window=6, keep=1 / 4, growth=0.0, chunk=8, apart=4)


def request(name: str, num_prompt: int = 3, **fields: Any) -> SubmitRequest:
    asked = {"max_tokens": 40, "seed": 1, "confidence": 0.0, "temperature": 0.0, "ignore_eos": True, **fields}
    return SubmitRequest(name, list(range(num_prompt)), SamplingParams(**asked), arrival_time=0.0)


@given(
    window=st.integers(0, 80),
    growth=st.sampled_from([0.0, 1 / 4, 1 / 3, 1 / 2]),
    keep=st.sampled_from([1 / 2, 1 / 4, 1 / 8]),
    chunk=st.sampled_from([8, 32, 64]),
    apart=st.sampled_from([4, 32]),
    limit=st.none() | st.integers(0, 400),
    length=st.integers(1, 1200),
)
@settings(max_examples=300)
def test_only_tokens_beyond_the_window_settle_at_fixed_places(
    window: int, growth: float, keep: float, chunk: int, apart: int, limit: int | None, length: int
) -> None:
    settling = Settling(window, keep, growth, chunk, apart)
    if limit is not None:
        settling = replace(settling, limit=settling.least_limit + limit)
    slots, settled, most = 0, 0, 0
    for computed in range(length):  # a token after the other, as an engine does
        most = max(most, slots)
        while settling.is_due(computed, settled):
            assert computed % apart == 0
            widest = computed if settling.limit is None else settling.limit // 2
            assert computed - settled - chunk >= max(window, min(int(computed * growth), widest))
            slots -= chunk
            if settled // chunk < settling.most_chunks:
                slots += settling.kept
            settled += chunk
        due = (place for place in itertools.count(computed + 1) if settling.is_due(place, settled))
        assert computed % 7 or settling.next_place(computed, settled) == next(due)
        slots += 1
    most = max(most, slots)
    assert settling.slots(length) == slots
    assert settling.most_slots(length) == most
    assert sum(1 for _ in settling.places(length)) * chunk == settled
    if settling.limit is not None:
        assert most <= settling.limit


def test_an_answer_of_1000_tokens_holds_less_than_half_of_its_slots() -> None:
    default = Settling(192, 1 / 4)
    assert 1024 / default.slots(1024) > 1.8
    assert default.slots(200) == 200


def test_exact_blocks_through_a_life() -> None:
    """Blocks of 4, chunks of 8 of which 2 stay: a block and a half come free, the rest moves up."""
    trunk = ScriptedTrunk()
    core = verified_core(
        VerifyingRunner(trunk), verified_config(settling=SMALL, block_size=4, num_blocks=40, max_model_len=100)
    )
    core.add(request("a", confidence=1.0, max_tokens=34))
    lives = []
    while core.has_work:
        core.step()
        core.check_integrity()
        if (sequence := core._scheduler._sequences.get("a")) is not None:
            lives.append((sequence.num_computed_outputs, sequence.num_slots, [*sequence.block_ids]))
    by_computed = {computed: (slots, blocks) for computed, slots, blocks in lives}
    # The prompt's 3 slots are block 0's; 16 tokens behind them, and the newest.
    assert by_computed[15] == (19, [0, 1, 2, 3, 4])
    # 16 are computed, so that 8 are 6 or more behind: slots 3 to 10 become two. Block 1, and of the tail one, are free.
    assert by_computed[16] == (20, [0, 1, 2, 3, 4])
    assert by_computed[17] == (15, [0, 2, 3, 4])
    assert by_computed[24] == (22, [0, 2, 3, 4, 1, 5])
    assert by_computed[25] == (17, [0, 3, 4, 1])
    assert core._scheduler.blocks.used_slots == 0


def test_what_settles_is_told_once() -> None:
    core = verified_core(
        VerifyingRunner(ScriptedTrunk()), verified_config(settling=SMALL, num_blocks=40, max_model_len=100)
    )
    core.add(request("a", confidence=1.0, max_tokens=34))
    told = [core.step().stats]
    while not told[-1] or not told[-1].settled_tokens:
        told.append(core.step().stats)
    told.append(core.fail_all("draining", "closing").stats)
    assert [stats.settled_tokens for stats in told if stats is not None] == [0] * (len(told) - 2) + [8, 0]


def test_exact_blocks_at_a_limit() -> None:
    """Of chunks of 8 two have slots at a time, two each; the third takes the first one's."""
    settling = Settling(window=6, keep=1 / 4, growth=0.0, chunk=8, apart=4, limit=22)
    assert (settling.least_limit, settling.most_chunks) == (20, 2)
    assert replace(settling, growth=0.1, limit=32).most_chunks == 2  # half of it is for a window that may grow
    core = verified_core(
        VerifyingRunner(ScriptedTrunk()),
        verified_config(settling=settling, block_size=4, num_blocks=40, max_model_len=100),
    )
    core.add(request("a", confidence=1.0, max_tokens=60))
    slots, blocks = {}, {}
    while core.has_work:
        core.step()
        core.check_integrity()
        if (sequence := core._scheduler._sequences.get("a")) is not None:
            slots[sequence.num_computed_outputs], blocks[sequence.num_computed_outputs] = (
                sequence.num_slots,
                [*sequence.block_ids],
            )
    assert (slots[24], slots[25], slots[32], slots[33]) == (22, 17, 24, 17)
    # The prompt's 3, the chunks' 4, and what is newer: two whole blocks come free at each place from here on.
    assert blocks[32] == [0, 3, 4, 1, 2, 5]
    assert blocks[33] == [0, 1, 2, 5]
    assert max(slots.values()) - 3 - 1 == settling.most_slots(60) <= 22  # the newest has no slot yet


def outputs_of(core: EngineCore, asked: list[SubmitRequest]) -> tuple[dict[str, list[int]], Counter[str]]:
    played = play(core, asked)
    return played.tokens, played.seen


@pytest.mark.parametrize("block_size", [2, 4, 8])
@pytest.mark.parametrize(("chunk", "limit"), [(4, None), (8, None), (4, 26), (8, 36)])
def test_drafts_preemption_and_shared_prompts_change_no_slot(block_size: int, chunk: int, limit: int | None) -> None:
    """The runner compares what every slot was computed among with the answer's first life."""
    settling = Settling(window=5, keep=1 / 4, growth=1 / 4, chunk=chunk, apart=4, limit=limit)
    seen = Counter[str]()
    for seed in range(8):
        draw = random.Random(f"{seed} {block_size}")
        trunk = ScriptedTrunk(seed)
        config = verified_config(
            settling=settling,
            block_size=block_size,
            num_blocks=-(-120 // block_size),
            max_model_len=100,
            max_num_seqs=6,
            max_num_batched_slots=20,
            prefix_cache=bool(seed % 2),
        )
        asked = [
            request(
                str(i),
                draw.randint(1, 20),
                max_tokens=draw.randint(1, 70),
                confidence=draw.choice([0.0, 1.0]),
                settle=draw.choice([None, None, False]),
            )
            for i in range(10)
        ]
        runner = VerifyingRunner(trunk, drafts_of(trunk, draw))
        tokens, told = outputs_of(verified_core(runner, config), asked)
        assert tokens == {r.request_id: trunk.answer(r, config) for r in asked}
        seen += told + runner.seen
    assert seen["preemptions"] > 10
    assert seen["settled"] > 1000
    assert seen["accepted"] > 100


@pytest.mark.slow
def test_ten_thousand_random_lives() -> None:
    lives = 0
    for seed in range(700):
        draw = random.Random(seed)
        trunk = ScriptedTrunk(seed)
        chunk = draw.choice([4, 8, 12])
        settling = Settling(draw.randint(3, 9), 1 / draw.choice([2, 4]), draw.choice([0, 1]) / 3, chunk, 4)
        if draw.random() < 0.4:
            settling = replace(settling, limit=settling.least_limit + draw.randint(0, 8))
        config = verified_config(
            settling=settling,
            block_size=draw.choice([1, 2, 3, 4, 8]),
            num_blocks=110,
            max_model_len=90,
            max_num_seqs=5,
            max_num_batched_slots=draw.choice([5, 20]),
            prefix_cache=draw.random() < 0.5,
        )
        runner = VerifyingRunner(trunk, drafts_of(trunk, draw))
        core = verified_core(runner, config)
        asked = [
            request(str(i), draw.randint(1, 15), max_tokens=draw.randint(1, 60), confidence=draw.choice([0.0, 1.0]))
            for i in range(15)
        ]
        found: dict[str, list[int]] = {r.request_id: [] for r in asked}
        aborted, waiting = set[str](), list(asked)
        while waiting or core.has_work:
            if waiting and draw.random() < 0.3:
                core.add(waiting.pop())
            if draw.random() < 0.01:
                aborted.add(name := str(draw.randrange(15)))
                core.abort(AbortRequest(name))
            for output in core.step().outputs:
                found[output.request_id] += output.token_ids
            core.check_integrity()
        for r in asked:
            answer = trunk.answer(r, config)
            assert found[r.request_id] == (answer[: len(found[r.request_id])] if r.request_id in aborted else answer)
        lives += len(asked)
    assert lives > 10_000


def test_a_request_may_keep_all_its_slots() -> None:
    trunk = ScriptedTrunk()
    core = verified_core(VerifyingRunner(trunk), verified_config(settling=SMALL))
    played = play(core, [request("a", settle=False), request("b")])
    assert played.outputs["a"][-1].dropped_slots == 0
    assert played.outputs["b"][-1].dropped_slots == 40 - SMALL.slots(40)
