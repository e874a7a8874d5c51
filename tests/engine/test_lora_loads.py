"""LoRA adapters on their way into a running engine: read beside its steps, taken over between two of them."""

from __future__ import annotations

import asyncio
import queue
import threading

import pytest

from async_engine import collect
from engine_builders import ENDLESS_LOAD
from fake_engines import fake_config, fake_core, fake_info
from fakes import EOS, ByteTokenizer, ScriptedRunner
from gates import StepGate
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.loras import CoreLoras, LoraStore
from hamburger.engine.hosts.engine_loop import LORA_THREAD, LoraRead, run_loop
from hamburger.engine.hosts.thread_host import ThreadHost
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.errors import EngineDead, EngineDraining, HamburgerError, InvalidRequest
from hamburger.engine.types.events import LoopEvent, Message, StepReport, Stop
from hamburger.engine.types.messages import LoadLora, LoraLoaded, SubmitRequest, UnloadLora
from hamburger.engine.types.sampling_params import SamplingParams
from lora_stores import HeldFolders, NamedFolders
from processes import host_of, is_alive, let_workers_find_builders

ASKED = GenerationRequest("r", [5, 6], SamplingParams(max_tokens=4, seed=0, ignore_eos=True))


def core_with(store: LoraStore, max_loras: int = 2, runner: ScriptedRunner | None = None) -> EngineCore:
    return fake_core(runner or ScriptedRunner(), fake_config(), lambda: 0.0, loras=CoreLoras(store, max_loras))


async def launched(core: EngineCore) -> AsyncEngine:
    return await AsyncEngine.launch(ThreadHost(lambda: (core, fake_info(core.config)), lambda: 0.0), ByteTokenizer())


async def begun(store: HeldFolders) -> None:
    await asyncio.to_thread(store.wait_for_begin)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_go_on_while_one_is_read_and_it_is_there_before_the_next_one(overlap: bool) -> None:
    store, inbox, told = HeldFolders(), queue.SimpleQueue[Message | LoraRead](), list[str]()
    loras = CoreLoras(store, 1)
    script = {"a": [[5], [6], [7], [8], [EOS]], "b": [[9, EOS]]}
    core = fake_core(ScriptedRunner(script), clock=lambda: 0.0, overlap=overlap, loras=loras)

    def deliver(event: LoopEvent) -> None:
        if isinstance(event, LoraLoaded):
            told.append(f"loaded {event.number}: {event.error}")
            inbox.put(SubmitRequest("b", [1], SamplingParams(seed=1), 0.0, lora=event.number))
        if not isinstance(event, StepReport):
            return
        told.extend(str(output.token_ids) for output in event.outputs.outputs)
        if len(told) == 3:  # three steps have passed since the load began
            store.wait_for_begin()
            store.let_through()
            [reading] = [thread for thread in threading.enumerate() if thread.name == LORA_THREAD]
            reading.join(30)
        elif not event.goes_on:
            inbox.put(Stop())

    inbox.put(SubmitRequest("a", [1, 2, 3], SamplingParams(seed=1), 0.0))
    inbox.put(LoadLora(1, "x"))
    run_loop(core, inbox, deliver, clock=lambda: 0.0)
    assert told[:4] == ["[5]", "[6]", "[7]", "loaded 1: None"]
    assert sorted(told[4:]) == sorted(["[8]", f"[{EOS}]", f"[9, {EOS}]"])
    assert store.loaded == {1: "x"}


def test_each_is_read_after_the_one_before_it_and_answered_once() -> None:
    store, inbox, told = HeldFolders(), queue.SimpleQueue[Message | LoraRead](), list[tuple[int, str | None]]()
    core = core_with(store, max_loras=2)
    gone = "The LoRA adapter was unloaded before it was read."
    full = "2 adapters are loaded, and max_loras is 2: unload one, or raise it."

    def deliver(event: LoopEvent) -> None:
        if isinstance(event, LoraLoaded):
            told.append((event.number, event.error))
            if event.number == 5:
                inbox.put(Stop())

    for message in (
        LoadLora(1, "a"), LoadLora(2, "bad"), LoadLora(3, "c"), LoadLora(4, "d"), LoadLora(5, "e"),
        UnloadLora(3), UnloadLora(3), UnloadLora(1), LoadLora(6, "f"),
    ):  # fmt: skip
        inbox.put(message)
    store.let_through(4)
    run_loop(core, inbox, deliver, clock=lambda: 0.0)
    # 1 was being read as it was unloaded: it came, and went at once.
    assert told == [(3, gone), (1, None), (2, "bad is no adapter."), (4, None), (5, None), (6, full)]
    assert store.loaded == {4: "d", 5: "e"}
    assert store.began == ["a", "bad", "d", "e"]


async def test_a_load_that_nobody_waits_for_leaves_nothing() -> None:
    store = HeldFolders()
    engine = await launched(core_with(store, max_loras=1))
    first, second = (asyncio.create_task(engine.load_lora(name, f"/{name}")) for name in "ab")
    await begun(store)
    for loading in (second, first):
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
    again = asyncio.create_task(engine.load_lora("a", "/again"))  # the name is free, and so will be the place
    store.let_through(2)
    assert (await again).path == "/again"
    assert store.began == ["/a", "/again"]
    assert list(store.loaded.values()) == ["/again"]
    assert not engine._loras._results
    await engine.shutdown(0)


async def test_a_name_is_taken_while_its_adapter_is_read() -> None:
    store = HeldFolders()
    engine = await launched(core_with(store))
    loading = asyncio.create_task(engine.load_lora("a", "/a"))
    await begun(store)
    with pytest.raises(InvalidRequest, match="'a' is loaded already"):
        await engine.load_lora("a", "/b")
    with pytest.raises(InvalidRequest, match="'a' is not loaded"):
        engine.unload_lora("a")
    with pytest.raises(InvalidRequest, match="'a' is not loaded"):
        engine.submit([GenerationRequest("r", [5], SamplingParams(), lora="a")])
    assert (await collect(engine.submit([ASKED])[0]))[-1].completion_tokens == 4  # while it is read
    store.let_through()
    assert (await loading).name == "a"
    assert list(store.loaded.values()) == ["/a"]
    await engine.shutdown(0)


async def test_who_loads_hears_of_an_engine_that_dies_meanwhile_and_may_load_into_the_next() -> None:
    store, gate, other = HeldFolders(), StepGate(), NamedFolders()
    engine = await launched(core_with(store, runner=ScriptedRunner(gate=gate, fail_at_step=1)))
    loading = asyncio.create_task(engine.load_lora("a", "/a"))
    waiting = asyncio.create_task(engine.load_lora("b", "/b"))
    await begun(store)
    [stream] = engine.submit([ASKED])
    gate.set()
    for each in (loading, waiting):
        with pytest.raises(EngineDead, match="stopped while it loaded a LoRA adapter"):
            await each
    with pytest.raises(EngineDead):
        await collect(stream)
    core = core_with(other)
    await engine.restart(ThreadHost(lambda: (core, fake_info(core.config)), lambda: 0.0))
    assert not engine.loras
    assert (await engine.load_lora("a", "/a")).name == "a"
    store.let_through()  # of the engine that died: nobody takes it
    assert list(other.loaded.values()) == ["/a"]
    await engine.shutdown(0)


async def test_who_loads_hears_of_a_shutdown_that_waits_for_no_load() -> None:
    store = HeldFolders()
    engine = await launched(core_with(store))
    loading = asyncio.create_task(engine.load_lora("a", "/a"))
    await begun(store)
    await engine.shutdown(0)
    with pytest.raises(EngineDead, match="stopped while it loaded a LoRA adapter"):
        await loading
    with pytest.raises(EngineDraining):
        await engine.load_lora("b", "/b")
    store.let_through()


async def test_a_fault_in_reading_one_ends_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(NamedFolders):
        def load(self, number: int, path: str) -> None:
            raise ValueError("a bug")

    engine = await launched(core_with(Broken(), max_loras=1))
    for _ in range(2):  # and takes no place
        with pytest.raises(HamburgerError, match=r"^/a cannot be read, by a fault of the server") as error:
            await engine.load_lora("a", "/a")
        assert not isinstance(error.value, InvalidRequest)  # what the client sent is not at fault: 500
    assert "The LoRA adapter /a cannot be read." in caplog.text
    assert (await collect(engine.submit([ASKED])[0]))[-1].completion_tokens == 4
    await engine.shutdown(0)


async def test_a_process_ends_though_it_reads_one(monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_find_builders(monkeypatch)
    host = host_of(ENDLESS_LOAD)
    engine = await AsyncEngine.launch(host, ByteTokenizer())
    loading = asyncio.create_task(engine.load_lora("a", "/a"))
    assert (await collect(engine.submit([ASKED])[0]))[-1].completion_tokens == 4
    async with asyncio.timeout(4):  # less than it waits for one that does not end by itself
        await engine.shutdown(0)
    with pytest.raises(EngineDead):
        await loading
    assert not is_alive(host.pid)
