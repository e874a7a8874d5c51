"""AsyncEngine: validation, streaming, aborts, failures and the end of its thread, on a scripted runner."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from fakes import (
    EOS,
    VOCAB_SIZE,
    ByteTokenizer,
    ScriptedRunner,
    StepGate,
    fake_config,
    fake_core,
    fake_engine,
    fake_info,
    scripted_logprobs,
    scripted_stop_prob,
)
from hamburger.engine.client import AsyncEngine, GenerationRequest, RequestStream, RequestTimings, RequestUpdate
from hamburger.engine.core import EngineCore
from hamburger.engine.errors import (
    ContextOverflow,
    EngineDead,
    EngineDraining,
    HamburgerError,
    InvalidRequest,
    NeverFits,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
)
from hamburger.engine.messages import EngineInfo, StepStats
from hamburger.engine.sampling_params import SamplingParams
from hamburger.engine.thread import ThreadHost
from reference import CONTEXT, Case, expected, random_case

LONG = SamplingParams(seed=0, ignore_eos=True)


def request(name: str, params: SamplingParams = LONG, prompt_ids: list[int] | None = None) -> GenerationRequest:
    return GenerationRequest(name, prompt_ids or [1, 2, 3], params)


async def collect(stream: RequestStream) -> list[RequestUpdate]:
    return [update async for update in stream]


async def until(condition: Callable[[], bool]) -> None:
    """Give the engine thread and the event loop time until something is so."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nothing tells what is waited for here
            await asyncio.sleep(0.001)


class Recorder:
    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.groups: list[tuple[float | None, int]] = []
        self.ends: list[tuple[str, int, int, RequestTimings]] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_group(self, gap_seconds: float | None, num_tokens: int) -> None:
        self.groups.append((gap_seconds, num_tokens))

    def on_finish(
        self,
        reason: Literal["stop", "length", "abort", "error"],
        params: SamplingParams,
        prompt_tokens: int,
        completion_tokens: int,
        timings: RequestTimings,
    ) -> None:
        self.ends.append((reason, prompt_tokens, completion_tokens, timings))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


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


@pytest.mark.parametrize(
    ("prompt_ids", "params", "error", "param", "words"),
    [
        ([], SamplingParams(), InvalidRequest, "prompt", "empty"),
        ([1, VOCAB_SIZE], SamplingParams(), InvalidRequest, "prompt", f"{VOCAB_SIZE}.*0..{VOCAB_SIZE - 1}"),
        ([1, -1], SamplingParams(), InvalidRequest, "prompt", "-1"),
        ([1] * 32, SamplingParams(), PromptTooLong, "prompt", "32 tokens.*holds 32"),
        ([1] * 100, SamplingParams(max_tokens=1), PromptTooLong, "prompt", "100 tokens.*holds 32"),
        ([1] * 30, SamplingParams(max_tokens=3), ContextOverflow, "max_tokens", "30 .*is 3.*33.*32.*to 2"),
        ([1], SamplingParams(stop_token_ids=(VOCAB_SIZE,)), InvalidRequest, "stop_token_ids", str(VOCAB_SIZE)),
        ([1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), InvalidRequest, "logit_bias", str(VOCAB_SIZE)),
        ([1] * 20, SamplingParams(min_tokens=20), InvalidRequest, "min_tokens", "20"),
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
        assert [end[0] for end in recorder.ends] == ["error"]
        assert recorder.ends[0][3] == RequestTimings(arrival=0.0, scheduled=None, first_token=None, finished=6.0)
        first.abort()


# Aborts


@pytest.mark.parametrize("how", ["abort", "break", "cancel", "aclose"])
async def test_leaving_early_frees_the_slots_within_one_step(how: str) -> None:
    recorder = Recorder()
    gate = StepGate()
    runner = ScriptedRunner(eos_chance=0, gate=gate)
    async with fake_engine(runner, observer=recorder) as engine:
        [stream] = engine.submit([request("a")])
        gate.step()
        if how == "abort":
            await until(lambda: engine.health().num_running == 1)
            stream.abort()
            stream.abort()
            await collect(stream)  # ends
        elif how == "break":
            async for _ in stream:
                break
        elif how == "cancel":
            task = asyncio.create_task(collect(stream))
            await until(lambda: engine.health().num_running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            iterator = aiter(stream)
            await anext(iterator)
            await iterator.aclose()
        await until(lambda: len(recorder.ends) == 1)
        gate.step()  # it may have begun already
        await until(lambda: recorder.steps[-1].num_running == 0)
        assert runner.num_steps <= 2
        assert recorder.steps[-1].used_slots == 0
        assert recorder.ends[0][0] == "abort"


async def test_gauges_fall_to_zero_after_a_mass_cancel() -> None:
    recorder = Recorder()
    gate = StepGate()
    async with fake_engine(ScriptedRunner(gate=gate), observer=recorder) as engine:
        streams = engine.submit([request(f"r{i}") for i in range(40)])
        gate.step()
        await until(lambda: engine.health().num_running == 8)
        for stream in streams:
            stream.abort()
        gate.set()
        await until(lambda: recorder.steps[-1].num_running == 0)
        health = engine.health()
        assert (health.num_running, health.num_waiting) == (0, 0)
        assert (recorder.steps[-1].used_slots, recorder.steps[-1].num_waiting) == (0, 0)
    assert [end[0] for end in recorder.ends] == ["abort"] * 40


async def test_a_slow_consumer_holds_up_nobody() -> None:
    async with fake_engine(ScriptedRunner(eos_chance=0)) as engine:
        slow, fast = engine.submit([request("slow"), request("fast")])
        iterator = aiter(slow)
        first = await anext(iterator)
        assert (await collect(fast))[-1].completion_tokens == 253
        await until(lambda: engine.health().num_running == 0)  # slow is done as well, though nobody read it
        rest = [update async for update in iterator]
        assert sum(len(update.token_ids) for update in [first, *rest]) == 253


# The end


async def test_a_failing_step_fails_every_request_at_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    async with fake_engine(ScriptedRunner(eos_chance=0, fail_at_step=3), observer=recorder, max_num_seqs=2) as engine:
        streams = engine.submit([request(f"r{i}") for i in range(5)])
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert [type(result) for result in results] == [EngineDead] * 5
        assert "RuntimeError: scripted failure" in str(results[0])
        with pytest.raises(EngineDead, match="scripted failure"):
            engine.submit([request("late")])
        with pytest.raises(EngineDead):  # whoever asks again hears it again
            await collect(streams[0])
        health = engine.health()
        assert (health.alive, health.error) == (False, "RuntimeError: scripted failure")
        assert (health.num_running, health.num_waiting, health.seconds_in_step) == (0, 0, None)
    assert [end[0] for end in recorder.ends] == ["error"] * 5
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "Traceback" in caplog.text


async def test_requests_that_the_dead_engine_never_saw_fail_too() -> None:
    gate = StepGate()
    runner = ScriptedRunner(fail_at_step=1, gate=gate)
    async with fake_engine(runner) as engine:
        engine.submit([request("a")])
        await until(lambda: runner.num_steps == 1)
        [unseen] = engine.submit([request("b")])
        gate.step()
        with pytest.raises(EngineDead):
            await collect(unseen)
        assert (engine.health().num_running, engine.health().num_waiting) == (0, 0)


async def test_drain_finishes_what_was_taken() -> None:
    runner = ScriptedRunner({name: [[65], [66], [EOS]] for name in "ab"})
    async with fake_engine(runner, max_num_seqs=1, drain_seconds=20) as engine:
        streams = engine.submit([request(name, SamplingParams()) for name in "ab"])
        engine.drain()
        assert engine.health().draining
        assert engine.health().alive
        with pytest.raises(EngineDraining):
            engine.submit([request("late")])
        await engine.shutdown(20)
        assert ["".join(u.text for u in await collect(stream)) for stream in streams] == ["AB", "AB"]
        assert not engine.health().alive
        assert engine.health().error is None


async def test_shutdown_gives_the_rest_up() -> None:
    recorder = Recorder()
    async with fake_engine(
        ScriptedRunner(eos_chance=0, delay_seconds=0.001), observer=recorder, max_num_seqs=1, max_model_len=1000
    ) as engine:
        streams = engine.submit([request("a"), request("b")])
        await anext(aiter(streams[0]))  # and abandoned: the generator is dropped, which aborts it
        [c] = engine.submit([request("c")])
        await engine.shutdown(0)
        for stream in (streams[1], c):
            with pytest.raises(EngineDraining):
                await collect(stream)
        await engine.shutdown(0)  # idempotent
    assert recorder.steps[-1].num_running == 0
    assert sorted(end[0] for end in recorder.ends) == ["abort", "error", "error"]


async def test_a_failing_build_raises_in_launch() -> None:
    def build() -> tuple[EngineCore, EngineInfo]:
        raise HamburgerError("no such model")

    with pytest.raises(HamburgerError, match="no such model"):
        await AsyncEngine.launch(ThreadHost(build), ByteTokenizer())
    await until(lambda: "hamburger-engine" not in {thread.name for thread in threading.enumerate()})


async def test_a_cancelled_launch_ends_its_thread() -> None:
    gate = threading.Event()

    def build() -> tuple[EngineCore, EngineInfo]:
        gate.wait()
        return fake_core(ScriptedRunner()), fake_info(fake_config())

    task = asyncio.create_task(AsyncEngine.launch(ThreadHost(build), ByteTokenizer()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await until(lambda: "hamburger-engine" not in {thread.name for thread in threading.enumerate()})


async def test_a_step_in_progress_shows_in_health() -> None:
    gate = StepGate()
    runner = ScriptedRunner({"a": [[EOS]]}, gate=gate)
    async with fake_engine(runner) as engine:
        assert engine.health().seconds_in_step is None
        [stream] = engine.submit([request("a", SamplingParams())])
        await until(lambda: runner.num_steps == 1)
        assert engine.health().seconds_in_step is not None
        gate.step()
        await collect(stream)
        await until(lambda: engine.health().seconds_in_step is None)


async def test_the_observer_hears_times_in_order() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    recorder = Recorder()
    async with fake_engine(ScriptedRunner({"a": [[65, 66], [67], [EOS]]}), observer=recorder, clock=clock) as engine:
        [stream] = engine.submit([request("a", SamplingParams())])
        await collect(stream)
    assert [num_tokens for _, num_tokens in recorder.groups] == [2, 1, 1]
    assert recorder.groups[0][0] is None
    assert all(gap is not None and gap > 0 for gap, _ in recorder.groups[1:])
    [(reason, prompt_tokens, completion_tokens, timings)] = recorder.ends
    assert (reason, prompt_tokens, completion_tokens) == ("stop", 3, 4)
    assert timings.scheduled is not None
    assert timings.first_token is not None
    assert timings.arrival < timings.scheduled < timings.first_token < timings.finished


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
