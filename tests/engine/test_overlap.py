"""OverlappedCore: steps are launched ahead, and every answer is the plain core's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from fake_engines import fake_config, fake_core, fake_engine
from fakes import EOS, ScriptedRunner
from hamburger.engine.core.core import EngineCore
from hamburger.engine.grammar.writing import json_grammar
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.messages import (
    AbortRequest,
    GroupOutput,
    RequestFailed,
    StepOutputs,
    StepStats,
    SubmitRequest,
)
from hamburger.engine.types.sampling_params import SamplingParams

CONTEXT = 48
INTEGER = json_grammar({"type": "integer"})
Answers = dict[str, list[GroupOutput]]


def request(name: str, prompt_ids: list[int], **params: object) -> SubmitRequest:
    return SubmitRequest(name, prompt_ids, SamplingParams(**{"seed": 1, **params}), arrival_time=0.0)  # type: ignore[arg-type]


def overlapped(runner: ScriptedRunner, **config: object) -> EngineCore:
    return fake_core(runner, fake_config(**config), lambda: 0.0, overlap=True)


def stats(outputs: StepOutputs) -> StepStats:
    assert outputs.stats is not None
    return outputs.stats


def blocks_of(core: EngineCore) -> dict[str, list[int]]:
    return {sequence.request_id: list(sequence.block_ids) for sequence in core._scheduler.running}


def test_each_step_is_launched_before_the_result_of_the_one_before_it() -> None:
    runner = ScriptedRunner({"a": [[1, 2], [3], [4, 5, EOS, 6]]})
    core = overlapped(runner)
    core.add(request("a", [7, 8, 9]))
    seen = []
    while core.has_work:
        step = core.step()
        core.check_integrity()
        [output] = step.outputs
        now = stats(step)
        seen.append((output.token_ids, runner.num_steps, now.prompt_slots, now.decoded_sequences, now.used_slots))
    # The slots of the step that runs are held too: the 3rd step's is slot 4, in a second block of 4 slots.
    assert seen == [([1, 2], 2, 3, 1, 4), ([3], 3, 0, 1, 8), ([4, 5, EOS], 4, 0, 1, 0)]
    assert runner.batches == [[("a", 3, True)], *[[("a", 1, True)]] * 3]
    # The fourth step was launched for nobody: it is not reported, and its group is nobody's.
    step = core.step()
    assert (step.outputs, stats(step).decoded_sequences, stats(step).num_running) == ([], 0, 0)


def test_blocks_of_the_step_that_runs() -> None:
    runner = ScriptedRunner({"a": [[1], [2], [EOS]], "b": [[i] for i in range(9)], "c": [[1, 2]] * 9})
    core = overlapped(runner, num_blocks=8, max_model_len=32, max_num_seqs=2)
    for name in "abc":
        core.add(request(name, [1] * 3, max_tokens=18))
    held = []
    for _ in range(5):
        core.step()
        core.check_integrity()
        held.append(blocks_of(core))
    assert held == [
        {"a": [0], "b": [1]},  # the second step fills both blocks
        {"a": [0, 2], "b": [1, 3]},  # and the third, which runs, needs two more
        {"b": [1, 3]},  # a has ended; the fourth step still writes to its slot 5, in block 2
        {"b": [1, 3], "c": [0]},  # c came with the fifth step, behind it; it fits into a's first block
        {"b": [1, 3], "c": [0]},
    ]
    assert runner.batches[3:5] == [[("a", 1, True), ("b", 1, True)], [("b", 1, True), ("c", 3, True)]]


def test_who_ends_by_length_for_certain_takes_no_part_in_the_next_step() -> None:
    runner = ScriptedRunner({"a": [[1], [2], [3]], "b": [[1, 2], [3, 4]]})
    core = overlapped(runner)
    core.add(request("a", [1], max_tokens=3))
    core.add(request("b", [1], max_tokens=4))
    while core.has_work:
        core.step()
    both = [("a", 1, True), ("b", 1, True)]
    # b might have gone on after its second group, which could have had a single token; a not after its third.
    assert runner.batches == [both, both, both]
    assert runner.emitted["b"] == [[1, 2], [3, 4], [EOS]]


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 4},
        {"grammar": INTEGER},
    ],
    ids=lambda params: next(iter(params)),
)
def test_rows_whose_groups_the_host_must_know_are_waited_for(params: dict[str, object]) -> None:
    runner = ScriptedRunner({"a": [[49]] * 5, "b": [[49]] * 5})
    core = overlapped(runner)
    core.add(request("a", [1], max_tokens=5))
    core.add(request("b", [1], max_tokens=4, **params))
    launched = []
    while core.has_work:
        core.step()
        launched.append(runner.num_steps)
    assert launched == [1, 2, 3, 5, 5]  # while b's last group is made, which it cannot go on after, a's fifth is begun


def test_min_tokens_hold_steps_up_only_until_they_are_reached() -> None:
    runner = ScriptedRunner({"a": [[97, 98]] * 9})
    core = overlapped(runner)
    core.add(request("a", [1], max_tokens=12, min_tokens=4))
    launched = []
    while core.has_work:
        core.step()
        launched.append(runner.num_steps)
    assert launched[:4] == [1, 2, 4, 5]


def test_a_prompt_that_is_scored_is_waited_for() -> None:
    runner = ScriptedRunner({"a": [[97]] * 5})
    core = overlapped(runner, max_num_batched_slots=8)
    core.add(request("a", list(range(20)), max_tokens=4, prompt_logprobs=1))
    launched = []
    while core.has_work:
        core.step()
        launched.append(runner.num_steps)
    assert launched == [1, 2, 3, 5, 6, 6]
    assert runner.num_scored == 19


def test_a_prompt_in_chunks_is_launched_ahead() -> None:
    runner = ScriptedRunner({"a": [[97], [98]]})
    core = overlapped(runner, max_num_batched_slots=8)
    core.add(request("a", list(range(20)), max_tokens=2))
    seen = []
    while core.has_work:
        step = core.step()
        seen.append((runner.num_steps, stats(step).prompt_slots, [o.token_ids for o in step.outputs]))
    assert seen == [(2, 8, []), (3, 8, []), (4, 4, [[97]]), (4, 0, [[98]])]


def test_a_pool_that_is_full_is_waited_for_before_anybody_loses_blocks() -> None:
    runner = ScriptedRunner({name: [[i] for i in range(40)] for name in "ab"})
    core = overlapped(runner, num_blocks=4, max_model_len=16)
    core.add(request("a", [1] * 4, max_tokens=8))
    core.add(request("b", [2] * 4, max_tokens=8))
    seen = []
    while core.has_work:
        step = stats(core.step())
        core.check_integrity()
        seen.append((runner.num_steps, step.num_running, step.num_preemptions, step.prompt_slots))
    # With its fifth group each has 8 slots, and the pool is full. b is preempted in the 6th step, as by the plain core.
    assert seen == [
        (2, 2, 0, 8), (3, 2, 0, 0), (4, 2, 0, 0), (5, 2, 0, 0), (5, 2, 0, 0),
        (7, 1, 1, 0), (8, 1, 0, 0), (8, 0, 0, 0),
        (10, 1, 0, 8), (11, 1, 0, 0), (11, 0, 0, 0),
    ]  # fmt: skip
    assert runner.emitted == {"a": [[i] for i in range(8)], "b": [[i] for i in range(8)]}


def test_somebody_of_a_higher_priority_is_waited_for() -> None:
    runner = ScriptedRunner({"low": [[97]] * 9, "high": [[97]] * 2})
    core = overlapped(runner, max_num_seqs=1)
    core.add(request("low", [1], max_tokens=5))
    core.step()
    core.add(replace(request("high", [2], max_tokens=2), priority=-1))
    core.step()  # low's second step, which runs already
    assert runner.num_steps == 2
    step = core.step()
    assert [o.request_id for o in step.outputs] == ["high"]
    assert stats(step).num_preemptions == 1
    core.check_integrity()


def test_an_abort_while_a_step_runs_frees_at_once_and_its_group_is_nobodys() -> None:
    runner = ScriptedRunner(eos_chance=0)
    core = overlapped(runner, prefix_cache=True)
    for name in "ab":
        core.add(request(name, [1, 2, 3], max_tokens=20))
    core.step()
    core.abort(AbortRequest("a"))
    core.check_integrity()
    core.add(request("a", [4, 5], max_tokens=1))  # the id comes again, with another request
    first = core.step()
    assert [o.request_id for o in first.outputs] == ["b"]
    second = core.step()
    assert [(o.request_id, o.finish_reason) for o in second.outputs] == [("b", None), ("a", "length")]
    core.abort(AbortRequest("b"))
    step = core.step()  # nobody waits for what runs: it is let go
    assert (step.outputs, stats(step).used_slots, stats(step).num_running) == ([], 0, 0)
    assert not core.has_work
    core.check_integrity()


def test_what_was_looked_up_for_a_step_that_is_let_go_counts() -> None:
    core = overlapped(ScriptedRunner(eos_chance=0), prefix_cache=True)
    core.add(request("a", [1, 2, 3], max_tokens=20))
    told = [core.step()]
    core.add(request("b", [4, 5], max_tokens=20))
    told.append(core.step())  # launches the first step of b
    for name in "ab":
        core.abort(AbortRequest(name))
    told.append(core.step())
    assert sum(stats(step).cache_queries for step in told) == 5


def test_fail_all_and_reset_let_the_running_step_go() -> None:
    runner = ScriptedRunner(eos_chance=0)
    core = overlapped(runner)
    for end in (lambda: core.fail_all("draining", "closing"), core.reset):
        core.add(request("a", [1, 2, 3], max_tokens=20))
        core.step()
        end()
        assert not core.has_work
        core.check_integrity()
        core.add(request("b", [1], max_tokens=1))
        assert [o.request_id for o in core.step().outputs] == ["b"]


def test_no_block_is_known_by_a_group_that_was_cut() -> None:
    runner = ScriptedRunner({"a": [[1], [2, EOS, 9]], "b": [[EOS]]})
    core = overlapped(runner, prefix_cache=True)
    core.add(request("a", [5, 6], max_tokens=20))
    while core.has_work:
        core.step()
    assert runner.batches == [[("a", 2, True)], [("a", 1, True)], [("a", 1, True)]]
    # Its four slots fill a block, but the last of them was fed [2, EOS, 9].
    assert not core._scheduler.blocks._block_of_key


def test_the_seconds_of_steps_add_up_to_the_time_that_passed() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    core = fake_core(ScriptedRunner(eos_chance=0), fake_config(), clock, overlap=True)
    core.add(request("a", [1], max_tokens=9))
    seconds = 0.0
    while core.has_work:
        seconds += stats(core.step()).seconds
    assert now[0] * 0.5 < seconds <= now[0]


async def test_streams_stop_strings_and_disconnects_through_the_whole_engine() -> None:
    runner = ScriptedRunner({"ends": [[72, 105], [EOS]], "stops": [[65], [66, 67, 68], *[[69]] * 40]}, eos_chance=0)
    async with fake_engine(runner, overlap=True) as engine:
        asked = {
            "ends": SamplingParams(),
            "stops": SamplingParams(stop=("BC",)),
            "leaves": SamplingParams(),
        }
        streams = engine.submit([GenerationRequest(name, [1, 2], params) for name, params in asked.items()])
        leaving = aiter(streams[2])
        await anext(leaving)
        await leaving.aclose()
        texts = ["".join([update.text async for update in stream]) for stream in streams[:2]]
        assert texts == ["Hi", "A"]
        [last] = engine.submit([GenerationRequest("last", [1], SamplingParams(max_tokens=1))])
        assert [update.finish_reason async for update in last] == ["length"]


@pytest.mark.parametrize("hundred", range(3))
def test_every_answer_is_the_plain_cores(hundred: int) -> None:
    seen: Counter[str] = Counter()
    for scenario in range(hundred * 100, hundred * 100 + 100):
        plain, _ = play(scenario, overlap=False)
        ahead, counts = play(scenario, overlap=True)
        assert ahead == plain, scenario
        seen += counts
    for what in ("preemptions", "launched ahead", "waited for", "grammars", "stop", "length", "scored"):
        assert seen[what] > 20, what


def play(scenario: int, *, overlap: bool) -> tuple[dict[str, list[GroupOutput | RequestFailed]], Counter[str]]:
    """Requests of every kind into a small pool. What each was told, without times and cached slots, which are the
    order's."""
    draw = random.Random(scenario)
    block_size = draw.choice([1, 2, 4, 8])
    max_num_seqs = draw.randint(1, 6)
    config = fake_config(
        max_model_len=CONTEXT,
        block_size=block_size,
        num_blocks=-(-CONTEXT // block_size) + draw.randint(0, 32 // block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_slots=max_num_seqs + draw.randint(0, 20),
        prefix_cache=draw.random() < 0.7,
    )
    runner = ScriptedRunner(seed=scenario, eos_chance=0.02, alphabet=b"123456789")
    core = fake_core(runner, config, lambda: 0.0, overlap)
    ordinary = draw.random() < 0.5
    waiting = [a_request(f"r{i}", draw, ordinary=ordinary) for i in range(draw.randint(2, 8))]
    answers: dict[str, list[GroupOutput | RequestFailed]] = {}
    seen = Counter({"grammars": sum(r.params.grammar is not None for r in waiting)})
    seen["scored"] = sum(r.params.prompt_logprobs is not None for r in waiting)
    arrivals = sorted(draw.randint(0, 12) for _ in waiting)
    num_steps = 0
    while waiting or core.has_work:
        while waiting and arrivals[0] <= num_steps:
            core.add(waiting.pop(0))
            arrivals.pop(0)
        step = core.step()
        core.check_integrity()
        num_steps += 1
        seen["preemptions"] += stats(step).num_preemptions
        seen["launched ahead" if runner.num_steps > num_steps else "waited for"] += 1
        for output in step.outputs:
            answers.setdefault(output.request_id, []).append(output._replace(scheduled_time=0.0, cached_slots=0))
            seen[output.finish_reason or "goes on"] += 1
        for failure in step.failures:
            answers.setdefault(failure.request_id, []).append(failure)
    return answers, seen


def a_request(name: str, draw: random.Random, *, ordinary: bool) -> SubmitRequest:
    """ordinary: nothing about it needs the host between two steps."""
    prompt = [draw.randrange(3) for _ in range(draw.randint(1, 20))]
    scored = draw.choice([None] * 5 + [1]) if not ordinary else None
    max_tokens = draw.randint(1 if scored is None else 0, CONTEXT - len(prompt))
    grammar = draw.choice([None] * 4 + [INTEGER]) if not ordinary else None
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=draw.randrange(9),
        ignore_eos=draw.random() < 0.3,
        min_tokens=draw.choice([0, 0, 0, min(3, max_tokens)]) if grammar is None and not ordinary else 0,
        stop_token_ids=draw.choice([(), (), (51,)]),
        logprobs=draw.choice([None, None, 0, 2]),
        prompt_logprobs=scored,
        presence_penalty=0.0 if ordinary else draw.choice([0.0] * 9 + [0.5]),
        logit_bias={} if ordinary else draw.choice([{}] * 9 + [{5: 1.0}]),
        grammar=grammar,
    )
    return SubmitRequest(name, prompt, params, 0.0, draw.choice([0, 0, 0, -1, 3]), draw.choice(["", "salt"]))
