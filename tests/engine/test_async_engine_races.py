"""AsyncEngine between its two threads: wake-ups, reports that are late, and whatever ends the engine thread."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from fake_engines import fake_config, fake_core, fake_engine, fake_info
from fakes import EOS, ByteTokenizer, ScriptedRunner
from gates import StepGate
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.core.batch import BatchResult, ScheduledBatch
from hamburger.engine.core.core import EngineCore
from hamburger.engine.health import liveness_fault
from hamburger.engine.hosts.thread_host import ThreadHost
from hamburger.engine.request import GenerationRequest
from hamburger.engine.request_stream import RequestStream
from hamburger.engine.types.errors import EngineDead, EngineDraining, InvalidRequest
from hamburger.engine.types.events import Message
from hamburger.engine.types.messages import EngineInfo, StepStats, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams

LONG = SamplingParams(seed=0, ignore_eos=True)


async def text_of(stream: RequestStream) -> str:
    return "".join([update.text async for update in stream])


async def step_begins(runner: ScriptedRunner, number: int) -> None:
    while runner.num_steps < number:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_steps_while_the_loop_is_busy_wake_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio reads its wake-up pipe until it is empty: one byte a step would keep the loop in there for good."""
    loop = asyncio.get_running_loop()
    wake, wakes = loop.call_soon_threadsafe, 0

    def counting(*args: Any, **kwargs: Any) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return wake(*args, **kwargs)

    runner = ScriptedRunner(eos_chance=0)
    async with fake_engine(runner) as engine:
        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        [stream] = engine.submit([GenerationRequest("a", [1, 2, 3], LONG)])
        while runner.num_steps < 50:  # the loop is held up here on purpose
            time.sleep(0.001)  # noqa: ASYNC251
        assert wakes == 1
        assert [update.completion_tokens async for update in stream][-1] == 253  # and nothing is missed


async def test_a_group_of_an_aborted_request_never_reaches_the_next_one_of_its_name() -> None:
    gate = StepGate()
    runner = ScriptedRunner({"a": [[65], [66], [67], [EOS]]}, gate=gate)
    async with fake_engine(runner) as engine:
        [first] = engine.submit([GenerationRequest("a", [1, 2, 3], SamplingParams())])
        iterator = aiter(first)
        gate.step()
        assert (await anext(iterator)).text == "A"
        await step_begins(runner, 2)
        await iterator.aclose()
        [second] = engine.submit([GenerationRequest("a", [1, 2, 3], SamplingParams())])
        gate.set()
        assert await text_of(second) == "ABC"


class Compiling(ThreadHost):
    """Holds requests with a grammar back, as the engine's process does while it compiles them."""

    held: SubmitRequest | None = None

    def send(self, message: Message) -> None:
        if isinstance(message, SubmitRequest) and message.params.grammar is not None:
            self.held = message
        else:
            super().send(message)

    def go_on(self) -> None:
        assert self.held is not None
        super().send(self.held)


async def test_whoever_overtakes_a_grammar_that_compiles_gets_all_groups_and_nobody_hangs() -> None:
    now = [0.0]
    core = fake_core(ScriptedRunner({"b": [[65], [66], [67], [EOS]]}), clock=lambda: now[0])
    host = Compiling(lambda: (core, fake_info(core.config)), lambda: now[0])
    engine = await AsyncEngine.launch(host, ByteTokenizer(), clock=lambda: now[0])
    now[0] = 1000.0
    [slow] = engine.submit([GenerationRequest("a", [1], SamplingParams(grammar="x"))])
    now[0] += 100
    assert liveness_fault(engine.health()) is None  # compiling is not hanging
    [fast] = engine.submit([GenerationRequest("b", [1], SamplingParams())])
    async with asyncio.timeout(20):
        assert await text_of(fast) == "ABC"
        now[0] += 100
        assert liveness_fault(engine.health()) is None
        host.go_on()
        with pytest.raises(InvalidRequest, match="The grammar cannot be used"):  # it was heard, too
            await text_of(slow)
    await engine.shutdown(0)


async def test_a_request_whose_grammar_still_compiles_as_the_engine_stops_is_told() -> None:
    """The stop overtakes it, so the core never hears of it."""
    core = fake_core(ScriptedRunner())
    host = Compiling(lambda: (core, fake_info(core.config)))
    engine = await AsyncEngine.launch(host, ByteTokenizer())
    [slow] = engine.submit([GenerationRequest("a", [1], SamplingParams(grammar="x"))])
    await engine.shutdown(0)
    assert engine.health().num_waiting == 0
    async with asyncio.timeout(20):
        with pytest.raises(EngineDraining, match="shutting down"):
            await text_of(slow)


async def test_an_engine_that_takes_nothing_hangs_from_when_it_was_asked() -> None:
    now = [0.0]
    core = fake_core(ScriptedRunner(), clock=lambda: now[0])
    host = ThreadHost(lambda: (core, fake_info(core.config)), lambda: now[0])
    engine = await AsyncEngine.launch(host, ByteTokenizer(), clock=lambda: now[0])
    host.send = lambda message: None  # type: ignore[method-assign]
    now[0] = 1000.0
    [stream] = engine.submit([GenerationRequest("a", [1], SamplingParams())])
    for seconds, fault in ((29, None), (31, "no step for 31 s, though requests wait")):
        now[0] = 1000.0 + seconds
        assert liveness_fault(engine.health()) == fault
    stream.abort()
    del host.send
    await engine.shutdown(0)


async def test_an_observer_that_fails_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def on_step(self, stats: StepStats) -> None: ...

        def on_group(self, gap_seconds: float | None, num_tokens: int) -> None:
            if gap_seconds is None:
                raise ValueError("a broken gauge")

        def on_start(self, *args: Any) -> None: ...

        def on_finish(self, *args: Any) -> None: ...

    async with fake_engine(ScriptedRunner({"a": [[65], [66], [EOS]]}), observer=Failing()) as engine:
        [stream] = engine.submit([GenerationRequest("a", [1], SamplingParams())])
        assert await text_of(stream) == "AB"
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a broken gauge"]


async def test_a_tokenizer_that_fails_ends_one_request_and_no_other() -> None:
    class Breaking(ByteTokenizer):
        def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
            if token_id == 66:
                raise ValueError("a broken token")
            return super().token_bytes(token_id, first=first)

    core = fake_core(ScriptedRunner({"a": [[65], [66], [67], [EOS]], "b": [[65], [67], [65], [EOS]]}))
    engine = await AsyncEngine.launch(ThreadHost(lambda: (core, fake_info(core.config))), Breaking())
    broken, whole = engine.submit([GenerationRequest(name, [1], SamplingParams()) for name in "ab"])
    assert await text_of(whole) == "ACA"
    with pytest.raises(EngineDead, match="a broken token"):
        await text_of(broken)
    assert engine.health().alive
    await engine.shutdown(0)


class Exiting:
    """A runner that ends its thread in a way that is no Exception."""

    def run(self, batch: ScheduledBatch) -> BatchResult:
        raise SystemExit("a library called sys.exit")


async def test_even_an_exit_in_the_engine_thread_is_heard() -> None:
    def build() -> tuple[EngineCore, EngineInfo]:
        return EngineCore(fake_config(), Exiting()), fake_info(fake_config())

    engine = await AsyncEngine.launch(ThreadHost(build), ByteTokenizer())
    [stream] = engine.submit([GenerationRequest("a", [1], LONG)])
    async with asyncio.timeout(20):
        with pytest.raises(EngineDead, match=r"SystemExit: a library called sys\.exit"):
            await text_of(stream)
    assert not engine.health().alive
    await engine.shutdown(0)


def test_an_engine_outlives_its_event_loop_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that closed without shutdown(): nobody is left to hear, and the thread must not fail over it."""
    gate = StepGate()
    runner = ScriptedRunner(eos_chance=0, gate=gate)

    async def leave() -> ThreadHost:
        core = fake_core(runner)
        host = ThreadHost(lambda: (core, fake_info(core.config)))
        engine = await AsyncEngine.launch(host, ByteTokenizer())
        engine.submit([GenerationRequest("a", [1, 2, 3], SamplingParams(max_tokens=4, seed=0, ignore_eos=True))])
        await step_begins(runner, 1)
        return host

    host = asyncio.run(leave())
    gate.set()
    host.abandon()
    asyncio.run(host.join())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
