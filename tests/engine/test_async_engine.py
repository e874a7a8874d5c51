"""AsyncEngine: one answer, what is refused, the queue, and whole answers, on a scripted runner."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from async_engine import Recorder, collect, request, until
from fake_engines import fake_engine
from fakes import EOS, VOCAB_SIZE, ScriptedRunner, scripted_logprobs, scripted_stop_prob
from gates import StepGate
from hamburger.engine.request import GenerationRequest, RequestUpdate
from hamburger.engine.types.errors import (
    ContextOverflow,
    InvalidRequest,
    NeverFits,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
)
from hamburger.engine.types.observer import RequestTimings
from hamburger.engine.types.sampling_params import SamplingParams
from reference import CONTEXT, Case, expected, random_case

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


# One answer


async def test_one_update_a_group() -> None:
    runner = ScriptedRunner({"a": [[72], [105, 32, 0xC3], [0xA9, EOS, 65]]})
    async with fake_engine(runner) as engine:
        [stream] = engine.submit([request("a", SamplingParams(logprobs=1))])
        updates = await collect(stream)
        assert await collect(stream) == []  # the end stays the end
    assert [update.text for update in updates] == ["H", "i ", "é"]
    assert [update.token_ids for update in updates] == [[72], [105, 32, 0xC3], [0xA9, EOS]]
    assert [(update.completion_tokens, update.kv_slots) for update in updates] == [(1, 1), (4, 2), (6, 3)]
    assert [(update.finish_reason, update.stop_reason) for update in updates] == [(None, None)] * 2 + [("stop", None)]
    assert updates[1].stop_probs == [scripted_stop_prob(1 + i, t) for i, t in enumerate([105, 32, 0xC3])]
    assert updates[1].logprobs == [scripted_logprobs(1 + i, t, 1) for i, t in enumerate([105, 32, 0xC3])]


async def test_several_answers_are_several_requests() -> None:
    async with fake_engine(ScriptedRunner()) as engine:
        with pytest.raises(InvalidRequest, match="submit a request for each answer"):
            engine.submit([request("a", SamplingParams(n=2))])


async def test_a_stop_string_trims_everything_and_frees_the_slots() -> None:
    recorder = Recorder()
    gate = StepGate()
    runner = ScriptedRunner({"a": [[65, 66], [67, 68, 69, 70], *[[71]] * 100]}, gate=gate)
    async with fake_engine(runner, observer=recorder) as engine:
        [stream] = engine.submit([request("a", SamplingParams(stop=("BCD",), logprobs=0))])
        gate.step()
        gate.step()
        updates = await collect(stream)
        gate.set()
        await until(lambda: recorder.steps[-1].num_running == 0)
    assert [update.text for update in updates] == ["A", ""]
    assert [update.token_ids for update in updates] == [[65, 66], [67, 68]]
    assert [len(update.stop_probs) for update in updates] == [2, 2]
    assert [len(update.logprobs or []) for update in updates] == [2, 2]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", "BCD")
    assert (updates[-1].completion_tokens, updates[-1].kv_slots) == (4, 2)
    assert recorder.steps[-1].used_slots == 0
    assert runner.num_steps <= 3  # the third had begun before the stop was seen


async def test_stop_token_ids_are_the_stop_reason_and_end_tokens_are_not() -> None:
    runner = ScriptedRunner({"a": [[65, 66]], "b": [[EOS]], "c": [[EOS]]})
    params = [SamplingParams(stop_token_ids=(66,)), SamplingParams(stop_token_ids=(EOS,))]
    params.append(SamplingParams(stop_token_ids=(EOS,), ignore_eos=True))
    async with fake_engine(runner) as engine:
        streams = engine.submit([request(name, p) for name, p in zip("abc", params, strict=True)])
        assert [(await collect(stream))[-1].stop_reason for stream in streams] == [66, None, EOS]


async def test_what_a_request_leaves_open_is_filled_in() -> None:
    seen: list[SamplingParams] = []

    class Spy(Recorder):
        def on_finish(self, reason: Any, params: SamplingParams, *rest: Any) -> None:
            seen.append(params)

    async with fake_engine(ScriptedRunner({"a": [], "b": []}), observer=Spy(), max_model_len=10) as engine:
        for stream in engine.submit([request("a", SamplingParams()), request("b", SamplingParams(confidence=0.3))]):
            await collect(stream)
    assert [params.max_tokens for params in seen] == [7, 7]
    assert [params.confidence for params in seen] == [0.8, 0.3]
    seeds = [params.seed for params in seen]
    assert None not in seeds
    assert seeds[0] != seeds[1]


# Validation

ALL = tuple(range(VOCAB_SIZE))
ALL_BUT_END = tuple((token_id,) for token_id in ALL if token_id != EOS)


@pytest.mark.parametrize(
    ("prompt_ids", "params", "error", "param", "words"),
    [
        ([], SamplingParams(), InvalidRequest, "prompt", "empty"),
        ([1, VOCAB_SIZE], SamplingParams(), InvalidRequest, "prompt", f"{VOCAB_SIZE}.*0..{VOCAB_SIZE - 1}"),
        ([1, -1], SamplingParams(), InvalidRequest, "prompt", "-1"),
        ([1] * 32, SamplingParams(), PromptTooLong, "prompt", "is 32 tokens.*prompt has 32"),
        ([1] * 100, SamplingParams(max_tokens=1), PromptTooLong, "prompt", "is 32 tokens.*prompt has 100"),
        ([1] * 30, SamplingParams(max_tokens=3), ContextOverflow, "max_tokens", "32 tokens.*30 .*is 3.*33.*to 2"),
        ([1], SamplingParams(stop_token_ids=(VOCAB_SIZE,)), InvalidRequest, "stop_token_ids", str(VOCAB_SIZE)),
        ([1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), InvalidRequest, "logit_bias", str(VOCAB_SIZE)),
        ([1] * 20, SamplingParams(min_tokens=20), ContextOverflow, "min_tokens", "32 tokens.*20 .*is 20.*to 12"),
        ([1], SamplingParams(min_tokens=2, bad_words=ALL_BUT_END), InvalidRequest, "min_tokens", "all others"),
        ([1], SamplingParams(min_tokens=2, stop_token_ids=ALL), InvalidRequest, "min_tokens", "forbids"),
    ],
)
async def test_what_can_never_succeed_is_refused(
    prompt_ids: list[int], params: SamplingParams, error: type[InvalidRequest], param: str, words: str
) -> None:
    runner = ScriptedRunner()
    async with fake_engine(runner, max_model_len=32) as engine:
        with pytest.raises(error, match=words) as caught:
            engine.submit([request("good"), GenerationRequest("bad", prompt_ids, params)])
        assert type(caught.value) is error
        assert caught.value.param == param
        assert engine.health().num_waiting == 0  # the good one was not taken either
    assert runner.num_steps == 0


async def test_what_the_whole_pool_cannot_hold_is_refused() -> None:
    async with fake_engine(ScriptedRunner(), max_model_len=32, info={"total_slots": 24}) as engine:
        with pytest.raises(NeverFits, match=r"28 KV slots.*holds 24") as caught:
            engine.submit([GenerationRequest("a", [1] * 21, SamplingParams(max_tokens=8))])
        assert caught.value.param == "max_tokens"
        [stream] = engine.submit([GenerationRequest("a", [1] * 21, SamplingParams(max_tokens=4))])
        await collect(stream)


async def test_the_longest_prompt_and_answer_that_fit() -> None:
    async with fake_engine(ScriptedRunner(eos_chance=0), max_model_len=32) as engine:
        prompts = [([1] * 31, None), ([1] * 30, 2), ([1], 31)]
        streams = engine.submit(
            [
                request(str(i), SamplingParams(max_tokens=n, seed=0), prompt_ids)
                for i, (prompt_ids, n) in enumerate(prompts)
            ]
        )
        lasts = [(await collect(stream))[-1] for stream in streams]
    assert [(last.completion_tokens, last.finish_reason) for last in lasts] == [(n, "length") for n in (1, 2, 31)]


async def test_request_ids_in_use_are_refused() -> None:
    async with fake_engine(ScriptedRunner(gate=StepGate())) as engine:
        with pytest.raises(ValueError, match="unique"):
            engine.submit([request("a"), request("a")])
        engine.submit([request("a")])
        with pytest.raises(ValueError, match="unique"):
            engine.submit([request("a")])


# The queue


async def test_a_full_queue_refuses_all_or_none() -> None:
    now = [0.0]
    gate = StepGate()
    async with fake_engine(ScriptedRunner(gate=gate), clock=lambda: now[0], max_num_seqs=2, max_queue=3) as engine:
        engine.submit([request(f"r{i}") for i in range(4)])  # two seats and two places in the queue
        now[0] = 7.5
        with pytest.raises(QueueFull, match="max_queue is 3") as caught:
            engine.submit([request("x"), request("y")])
        assert caught.value.retry_after == 8  # nothing has finished in 7.5 s
        [last] = engine.submit([request("x")])
        with pytest.raises(QueueFull):
            engine.submit([request("y")])
        last.abort()
        gate.step()
        await until(lambda: engine.health().num_running > 0)
        if engine.health().num_running == 1:  # the step began when only the first had come
            gate.step()
        await until(lambda: engine.health().num_running == 2)
        assert engine.health().num_waiting == 3 - 1  # the abort was counted with the step after it
        engine.submit([request("z")])
        with pytest.raises(QueueFull):
            engine.submit([request("y")])


async def test_retry_after_follows_the_rate_of_finished_requests() -> None:
    now = [0.0]
    gate = StepGate()
    async with fake_engine(
        ScriptedRunner(gate=gate), clock=lambda: now[0], max_num_seqs=1, max_queue=9, max_queue_seconds=100
    ) as engine:
        streams = engine.submit([request(f"r{i}") for i in range(10)])
        for second in (10, 20, 30):
            now[0] = second
            streams.pop().abort()  # one leaves every 10 s
        gate.step()
        await until(lambda: engine.health().num_running == 1)
        gate.step()
        await until(lambda: engine.health().num_waiting == 6)
        engine.submit([request(f"s{i}") for i in range(3)])
        with pytest.raises(QueueFull) as caught:
            engine.submit([request("x"), request("y")])
        assert caught.value.retry_after == 20
        with pytest.raises(QueueFull) as caught:
            engine.submit([request(f"t{i}") for i in range(50)])
        assert caught.value.retry_after == 100  # no longer than anyone may wait


async def test_a_request_that_waits_too_long_raises_queue_timeout() -> None:
    now = [0.0]
    gate = StepGate()
    recorder = Recorder()
    runner = ScriptedRunner(gate=gate)
    async with fake_engine(
        runner, clock=lambda: now[0], observer=recorder, max_num_seqs=1, max_queue_seconds=5
    ) as engine:
        first, second = engine.submit([request("a"), request("b")])
        await until(lambda: runner.num_steps == 1)
        now[0] = 6.0
        gate.step()
        gate.step()
        with pytest.raises(QueueTimeout, match=r"6\.0 s"):
            await collect(second)
        assert [end[0] for end in recorder.ends] == ["timeout"]
        assert recorder.ends[0][3] == RequestTimings(arrival=0.0, scheduled=None, first_token=None, finished=6.0)
        first.abort()


# The whole path


def check(case: Case, updates: list[RequestUpdate]) -> None:
    want = expected(case)
    assert "".join(update.text for update in updates) == want.text, case
    assert [token for update in updates for token in update.token_ids] == want.token_ids, case
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == (want.finish_reason, want.stop_reason), case
    assert [update.finish_reason for update in updates[:-1]] == [None] * (len(updates) - 1)
    assert [p for update in updates for p in update.stop_probs] == [
        scripted_stop_prob(i, token) for i, token in enumerate(want.token_ids)
    ]
    counted = 0
    for i, update in enumerate(updates):
        counted += len(update.token_ids)
        assert (update.completion_tokens, update.kv_slots) == (counted, i + 1)
        if case.params.logprobs is not None:
            assert update.logprobs is not None
            assert len(update.logprobs) == len(update.token_ids)


@pytest.mark.parametrize("num_blocks", [256, CONTEXT // 4])
async def test_random_streams_equal_the_reference(num_blocks: int) -> None:
    """Streamed == reference; test_llm.py shows the same for unstreamed answers, on the same cases."""
    draw = random.Random(num_blocks)
    cases = {str(i): random_case(draw) for i in range(300)}
    runner = ScriptedRunner({name: case.groups for name, case in cases.items()})
    async with fake_engine(runner, max_model_len=CONTEXT, num_blocks=num_blocks) as engine:
        streams = engine.submit([GenerationRequest(name, case.prompt_ids, case.params) for name, case in cases.items()])
        answers = await asyncio.gather(*map(collect, streams))
        await until(lambda: engine.health().num_running == 0)
    for case, updates in zip(cases.values(), answers, strict=True):
        check(case, updates)
