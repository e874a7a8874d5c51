"""Settling and the prefix cache: what the next turn of a conversation finds of an answer, and that nothing moved it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hamburger.engine.core.batch import ScheduledBatch, SettlingChunk
from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.errors import OutOfMemory
from hamburger.engine.types.messages import AbortRequest, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.engine.types.settling import Settling
from playing import play
from slow_cases import slow
from verified import ScriptedTrunk, VerifyingRunner, drafts_of, verified_config, verified_core

SMALL = Settling(window=6, keep=1 / 4, growth=0.0, chunk=8, apart=4)


def request(name: str, prompt: list[int], **fields: Any) -> SubmitRequest:
    asked = {"max_tokens": 40, "seed": 1, "confidence": 0.0, "temperature": 0.0, "ignore_eos": True, **fields}
    return SubmitRequest(name, prompt, SamplingParams(**asked), arrival_time=0.0)


def core_and_runner(**changes: Any) -> tuple[EngineCore, VerifyingRunner]:
    runner = VerifyingRunner(trunk := ScriptedTrunk(), drafts_of(trunk, random.Random(1)))
    given = {
        "settling": SMALL,
        "block_size": 4,
        "num_blocks": 40,
        "max_model_len": 100,
        "prefix_cache": True,
        **changes,
    }
    return verified_core(runner, verified_config(**given)), runner


FIRST = request("first", list(range(10)))  # two whole blocks; 16 tokens of its answer are computed before any settle


@pytest.mark.parametrize(("max_tokens", "found"), [(1, 8), (8, 16), (14, 20), (17, 24), (18, 8), (40, 8)])
def test_the_next_turn_reads_an_answer_of_which_nothing_settled(max_tokens: int, found: int) -> None:
    core, _ = core_and_runner()
    first = replace(FIRST, params=replace(FIRST.params, max_tokens=max_tokens))
    answer = play(core, [first]).tokens["first"]
    turn = request("second", [*first.prompt_ids, *answer, 3, 1, 2])
    played = play(core, [turn])
    assert played.outputs["second"][0].cached_slots == found
    assert played.tokens == play(core_and_runner(prefix_cache=False)[0], [turn]).tokens


def test_while_it_runs_nobody_reads_what_may_still_move() -> None:
    core, _ = core_and_runner()
    core.add(FIRST)
    running = core._scheduler._sequences["first"]
    while running.num_output_tokens < 12:
        core.step()
    prompt = [*FIRST.prompt_ids, *running.output_ids[:10], 3]
    core.add(request("second", prompt, max_tokens=1))
    assert core.step().outputs[-1].cached_slots == 8
    core.abort(AbortRequest("first"))
    core.check_integrity()
    assert play(core, [request("third", prompt, max_tokens=1)]).outputs["third"][0].cached_slots == 20


def test_nothing_is_read_of_an_answer_that_memory_did_not_let_settle() -> None:
    core, runner = core_and_runner()

    def fail(chunk: SettlingChunk) -> None:
        raise OutOfMemory("scripted")

    core._settle_chunk = fail
    played = play(core, [FIRST])
    assert played.seen["out_of_memory"] == 1
    core._settle_chunk = runner.settle
    turn = request("second", [*FIRST.prompt_ids, *played.tokens["first"], 3], max_tokens=1)
    assert play(core, [turn]).outputs["second"][0].cached_slots == 8


@pytest.mark.parametrize("seeds", [range(25), slow(range(25, 300))])
def test_conversations_in_small_pools_say_what_each_turn_would_say_alone(seeds: range) -> None:
    """Turns that follow each other, several of one answer, aborts, memory that ends, priorities. The runner compares
    what is read with what was written, and each token's sight with that of its answer's first life."""
    seen = Counter[str]()
    for seed in seeds:
        converse(random.Random(seed), ScriptedTrunk(seed), seen)
    assert min(seen[what] for what in ("preempted", "cached", "settled", "accepted", "whole", "aborted")) > 10


def converse(draw: random.Random, trunk: ScriptedTrunk, seen: Counter[str]) -> None:
    """Three conversations on one core, whose answers are compared with the trunk's."""
    settling = Settling(draw.randint(3, 9), 1 / draw.choice([2, 4]), draw.choice([0, 1]) / 3, draw.choice([4, 8]), 4)
    if draw.random() < 0.3:
        settling = replace(settling, limit=settling.least_limit + draw.randint(0, 8))
    size, failing = draw.choice([1, 2, 3, 4, 8]), draw.choice([0.0, 0.0, 0.02])
    config = verified_config(
        settling=settling,
        block_size=size,
        num_blocks=-(-draw.randint(150, 200) // size),
        max_model_len=150,
        max_num_seqs=5,
        max_num_batched_slots=draw.choice([5, 20, 64]),
        prefix_cache=True,
    )

    def fails(step: int, batch: ScheduledBatch) -> bool:
        return batch.num_rows > 1 and draw.random() < failing

    runner = VerifyingRunner(trunk, drafts_of(trunk, draw), fails)
    core = verified_core(runner, config)
    asked: list[SubmitRequest] = []
    found: dict[str, list[int]] = {}

    def step() -> None:
        told = core.step()
        core.check_integrity()
        seen["preempted"] += told.stats.num_preemptions if told.stats else 0
        for output in told.outputs:
            found[output.request_id] += output.token_ids
            seen["cached"] += output.cached_slots

    talks = [[draw.randrange(4) for _ in range(draw.randint(1, 20))] for _ in range(3)]
    for number in range(14):
        talk, name = draw.choice(talks), str(number)
        fields = {"confidence": draw.choice([0.0, 1.0]), "settle": draw.choice([None, None, False])}
        one = request(name, [*talk], max_tokens=draw.randint(1, 50), **fields)
        asked.append(replace(one, priority=draw.choice([0, 0, 1])))
        found[name] = []
        core.add(asked[-1])
        for _ in range(draw.choice([0, 2, 5, 20])):
            step()
        if draw.random() < 0.2:
            core.abort(AbortRequest(name))
            core.check_integrity()
        said = found[name][: draw.randint(1, 40)]
        if said and len(talk) + len(said) < 95:
            talk += [*said, draw.randrange(4)]
    while core.has_work:
        step()
    for one in asked:
        answer, mine = trunk.answer(one, config), found[one.request_id]
        assert mine == answer[: len(mine)]
        seen["whole" if mine == answer else "aborted"] += 1
    seen.update(runner.seen)
