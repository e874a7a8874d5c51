"""AsyncEngine: aborts, failures, drains and the end of its thread, and what is heard of them, on a scripted runner."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from async_engine import Recorder, collect, request, until
from fake_engines import fake_config, fake_core, fake_engine, fake_info
from fakes import EOS, ByteTokenizer, ScriptedRunner
from gates import StepGate
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.core.core import EngineCore
from hamburger.engine.hosts.thread_host import ThreadHost
from hamburger.engine.types.errors import (
    EngineDead,
    EngineDraining,
    HamburgerError,
)
from hamburger.engine.types.messages import EngineInfo
from hamburger.engine.types.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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


async def test_an_engine_that_dies_after_its_launch_was_cancelled_is_nobodys_error() -> None:
    gate = threading.Event()
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    def build() -> tuple[EngineCore, EngineInfo]:
        gate.wait()
        raise HamburgerError("no such model")

    task = asyncio.create_task(AsyncEngine.launch(ThreadHost(build), ByteTokenizer()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await until(lambda: "hamburger-engine" not in {thread.name for thread in threading.enumerate()})
    await asyncio.sleep(0)  # what the thread said last
    assert not errors


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
