"""LoRA adapters in the core: how many, for how long, and that no two read each other's slots. No tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_engine import collect
from fake_engines import fake_config, fake_core, fake_info
from fakes import ByteTokenizer, ScriptedRunner
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.core.block_manager import BlockManager
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.hosts.thread_host import ThreadHost
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import EngineDead, UnknownAdapter
from hamburger.engine.types.messages import AbortRequest, LoadLora, SubmitRequest, UnloadLora
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.config import ConfigError
from lora_stores import NamedFolders


def core_with(store: NamedFolders, max_loras: int = 2, **fields: Any) -> EngineCore:
    return fake_core(ScriptedRunner(), fake_config(**fields), lambda: 0.0, loras=CoreLoras(store, max_loras))


def request(name: str, lora: int = 0, prompt: list[int] | None = None) -> SubmitRequest:
    sampling = SamplingParams(max_tokens=6, seed=0, confidence=0.0, ignore_eos=True)
    return SubmitRequest(name, prompt or [5, 6, 7], sampling, 0.0, lora=lora)


def test_an_adapter_stays_until_its_last_request_ends() -> None:
    store = NamedFolders()
    core = core_with(store)
    assert core.load_lora(LoadLora(1, "a")) is None
    core.add(request("r", lora=1))
    core.add(request("other"))
    core.step()
    core.unload_lora(UnloadLora(1))
    assert store.loaded == {1: "a"}
    core.add(request("waits", lora=1))  # its message overtook none, but a grammar was compiled meanwhile
    core.abort(AbortRequest("waits"))
    while core.has_work:
        core.step()
        if not any(s.request_id == "r" for s in core._scheduler.running):
            break
    assert store.loaded == {}
    core.check_integrity()


def test_unused_adapters_go_at_once_and_requests_that_come_too_late_are_refused() -> None:
    store = NamedFolders()
    core = core_with(store)
    core.load_lora(LoadLora(1, "a"))
    core.unload_lora(UnloadLora(1))
    core.unload_lora(UnloadLora(9))  # never heard of
    assert store.loaded == {}
    core.add(request("late", lora=1))
    assert core.has_work
    [failure] = core.step().failures
    assert (failure.request_id, failure.kind) == ("late", "lora")
    assert failure.message == "The LoRA adapter was unloaded before the request came to run."


def test_no_more_are_loaded_than_there_is_room_for() -> None:
    store = NamedFolders()
    core = core_with(store)
    assert core.load_lora(LoadLora(1, "bad")) == "bad is no adapter."
    assert core.load_lora(LoadLora(2, "a")) is None
    assert core.load_lora(LoadLora(3, "b")) is None
    assert core.load_lora(LoadLora(4, "c")) == "2 adapters are loaded, and max_loras is 2: unload one, or raise it."
    core.add(request("r", lora=2))
    core.step()
    core.unload_lora(UnloadLora(2))
    assert core.load_lora(LoadLora(5, "c")) == (
        "2 adapters are loaded, 1 of them until their last requests end, and max_loras is 2: unload one, or raise it."
    )
    core.unload_lora(UnloadLora(3))
    assert core.load_lora(LoadLora(6, "c")) is None
    assert store.loaded == {2: "a", 6: "c"}
    core.add(request("s", lora=6))
    core.step()
    core.unload_lora(UnloadLora(6))
    assert core.load_lora(LoadLora(7, "d")) == (
        "2 adapters are loaded, 2 of them until their last requests end, and max_loras is 2: "
        "wait for that, or raise it."
    )


def test_one_that_is_unloaded_while_it_is_read_goes_as_soon_as_it_has_been() -> None:
    store = NamedFolders()
    core = core_with(store, max_loras=1)
    assert core.begin_lora(LoadLora(1, "a")) is None
    core.unload_lora(UnloadLora(1))
    assert core.read_lora(LoadLora(1, "a")) is None
    core.step()
    assert store.loaded == {1: "a"}  # not from under the hands of who reads it
    core.end_lora(1, None)
    assert store.loaded == {}
    assert core.load_lora(LoadLora(2, "b")) is None
    core.unload_lora(UnloadLora(2))
    assert core.begin_lora(LoadLora(3, "bad")) is None
    core.unload_lora(UnloadLora(3))
    core.end_lora(3, core.read_lora(LoadLora(3, "bad")))
    assert core.load_lora(LoadLora(4, "d")) is None
    assert store.loaded == {4: "d"}


def test_one_is_begun_after_the_other() -> None:
    core = core_with(NamedFolders())
    assert core.begin_lora(LoadLora(1, "a")) is None
    with pytest.raises(RuntimeError, match="before the one before it had ended"):
        core.begin_lora(LoadLora(2, "b"))
    core.add(request("early", lora=1))  # it is not there yet
    assert [failure.kind for failure in core.step().failures] == ["lora"]


def test_an_adapter_whose_last_request_was_aborted_leaves_room_at_once() -> None:
    store = NamedFolders()
    core = core_with(store, max_loras=1)
    core.load_lora(LoadLora(1, "a"))
    core.add(request("r", lora=1))
    core.step()
    core.unload_lora(UnloadLora(1))
    core.abort(AbortRequest("r"))
    assert core.load_lora(LoadLora(2, "b")) is None  # before another step
    assert store.loaded == {2: "b"}


def test_without_max_loras_none_is_loaded() -> None:
    core = fake_core(ScriptedRunner())
    assert core.load_lora(LoadLora(1, "a")) == "No LoRA adapters are served: max_loras is 0."
    core.unload_lora(UnloadLora(1))
    core.add(request("r", lora=1))
    assert [failure.kind for failure in core.step().failures] == ["lora"]


def test_adapters_share_no_blocks() -> None:
    """The same prompt under the base and two adapters, then each once more."""
    blocks = BlockManager(16, 4, prefix_cache=True)
    prompt = list(range(9))
    held: dict[tuple[int, int], list[int]] = {}
    for turn in range(2):
        for lora in range(3):
            s = Sequence(request(f"{turn} {lora}", lora, prompt), (), 100)
            blocks.admit(s)
            held[turn, lora] = list(s.block_ids)
            s.num_computed_slots = s.num_slots
            blocks.mark_computed(s, s.num_slots)
            blocks.check_integrity()
    assert held == {
        (0, 0): [0, 1, 2], (0, 1): [3, 4, 5], (0, 2): [6, 7, 8],
        (1, 0): [0, 1, 9], (1, 1): [3, 4, 10], (1, 2): [6, 7, 11],
    }  # fmt: skip


def test_no_salt_is_taken_for_an_adapter() -> None:
    keys = {
        Sequence(
            SubmitRequest("r", [1, 2, 3, 4], SamplingParams(), 0.0, cache_salt=salt, lora=lora), (), 100
        ).block_key(0, 4)
        for salt in ("", "1", "\x01", "\x00" * 8)
        for lora in (0, 1, 256, 2**40)
    }
    assert len(keys) == 16


def host_of(core: EngineCore) -> ThreadHost:
    return ThreadHost(lambda: (core, fake_info(core.config)), lambda: 0.0)


async def test_an_engine_that_dies_while_it_gets_its_adapters_again_may_start_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = [core_with(NamedFolders()) for _ in range(3)]
    cores[0]._runner, cores[1]._runner = ScriptedRunner(fail_at_step=1), ScriptedRunner(fail_at_step=1)
    engine = await AsyncEngine.launch(host_of(cores[0]), ByteTokenizer())
    await engine.load_lora("kept", "/kept")
    asked = GenerationRequest("r", [5, 6], SamplingParams(max_tokens=3, seed=0, ignore_eos=True))

    async def dead(host: ThreadHost) -> None:
        raise EngineDead("The engine stopped while it loaded a LoRA adapter.")

    with monkeypatch.context() as patched:
        patched.setattr(engine._loras, "load_again", dead)
        for host in (None, host_of(cores[1])):
            if host is not None:
                await engine.restart(host)  # raises nothing: it had been built
            with pytest.raises(EngineDead):
                await collect(engine.submit([asked])[0])
            assert await engine.stopped() is not None
    await engine.restart(host_of(cores[2]))
    assert (await collect(engine.submit([asked])[0]))[-1].completion_tokens == 3
    await engine.shutdown(0)


async def test_an_engine_that_starts_again_has_its_adapters_again(caplog: pytest.LogCaptureFixture) -> None:
    stores = NamedFolders(), NamedFolders()
    cores = [core_with(store) for store in stores]
    cores[0]._runner = ScriptedRunner(fail_at_step=1)
    engine = await AsyncEngine.launch(host_of(cores[0]), ByteTokenizer())
    kept, gone = await engine.load_lora("kept", "/kept"), await engine.load_lora("gone", "/gone")
    sampling = SamplingParams(max_tokens=3, seed=0, ignore_eos=True)
    asked = GenerationRequest("r", [5, 6], sampling, lora="kept")
    with pytest.raises(EngineDead):
        await collect(engine.submit([asked])[0])
    with pytest.raises(EngineDead):
        await engine.load_lora("new", "/new")
    engine._loras._adapters["gone"] = replace(gone, path="/gone/bad")  # its folder was changed meanwhile
    await engine.restart(host_of(cores[1]))
    assert stores[1].loaded == {kept.number: "/kept"}
    assert list(engine.loras) == ["kept"]
    assert "The LoRA adapter 'gone' is not loaded again: /gone/bad is no adapter." in caplog.text
    assert (await collect(engine.submit([asked])[0]))[-1].completion_tokens == 3
    with pytest.raises(UnknownAdapter, match="The LoRA adapter 'gone' is not loaded"):
        engine.submit([replace(asked, lora="gone")])
    await engine.shutdown(0)


def test_ranks_have_no_adapters() -> None:
    with pytest.raises(ConfigError, match="max_loras is 2, but tensor_parallel_size is 2, and ranks do not tell"):
        EngineArgs(tensor_parallel_size=2, max_loras=2)


class Adapters(RuleBasedStateMachine):
    """Whatever comes in whatever order: who runs finds its adapter, and what was unloaded goes when nobody uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.known, self.number = NamedFolders(), list[int](), 0
        self.reading, self.is_wanted = 0, True
        self.core = core_with(self.store, 3, num_blocks=16, max_model_len=32)

    @precondition(lambda self: not self.reading)
    @rule()
    def begin(self) -> None:
        self.number += 1
        held = len(self.store.loaded)
        error = self.core.begin_lora(LoadLora(self.number, "x"))
        assert (error is None) == (held < 3)
        if error is None:
            self.reading, self.is_wanted = self.number, True

    @precondition(lambda self: self.reading)
    @rule(path=st.sampled_from(["x", "bad"]))
    def end(self, path: str) -> None:
        number, self.reading = self.reading, 0
        error = self.core.read_lora(LoadLora(number, path))
        self.core.end_lora(number, error)
        if error is None and self.is_wanted:
            self.known.append(number)

    @precondition(lambda self: self.reading)
    @rule()
    def unload_what_is_read(self) -> None:
        self.is_wanted = False
        self.core.unload_lora(UnloadLora(self.reading))

    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        if self.known:
            number = data.draw(st.sampled_from(self.known))
            self.known.remove(number)
            self.core.unload_lora(UnloadLora(number))

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.number += 1
        lora = data.draw(st.sampled_from([0, *self.known]))
        self.core.add(request(str(self.number), lora))

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            assert not self.core.step().failures
        self.core.check_integrity()

    @invariant()
    def all_find_theirs(self) -> None:
        used = {s.lora for s in (*self.core._scheduler.running, *self.core._scheduler.waiting)} - {0}
        assert used | {*self.known} == {*self.store.loaded}


TestAdapters = Adapters.TestCase
TestAdapters.settings = hypothesis_settings(max_examples=30, stateful_step_count=30)
