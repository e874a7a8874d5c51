"""Supervisor: restarts are counted, and a hung engine is asked for its stacks once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from async_engine import collect
from engine_builders import BUILDER
from fake_engines import fake_engine
from fakes import ByteTokenizer
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.hosts.process_host import ProcessHost, Worker
from hamburger.engine.logs import LogFormat
from hamburger.engine.request import GenerationRequest
from hamburger.engine.transport.cpu_placement import CpuPlacement
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import EngineDead
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.server.operation import supervisor as module
from hamburger.server.operation.supervisor import Supervisor
from processes import let_workers_find_builders
from serving import until


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines are those of engine_builders."""
    let_workers_find_builders(monkeypatch)

    def host(
        args: EngineArgs,
        on_progress: Callable[[str], None],
        log_level: str,
        log_format: LogFormat,
        worker: Worker | None,
        placement: CpuPlacement,
    ) -> ProcessHost:
        return ProcessHost(args, on_progress, BUILDER, log_level, log_format, worker, placement)

    monkeypatch.setattr(module, "ProcessHost", host)


@pytest.mark.usefixtures("scripted")
async def test_an_engine_is_started_as_often_as_allowed() -> None:
    lines: list[str] = []
    supervisor = Supervisor(EngineArgs(model="slow"), lines.append, restarts=2)
    engine = await AsyncEngine.launch(supervisor.host, ByteTokenizer())
    keeping = asyncio.create_task(supervisor.keep_alive(engine))
    params = SamplingParams(max_tokens=3, seed=0, ignore_eos=True)
    starts: list[float] = []
    for left in (2, 1, 0):
        starts.append(engine.ready_at)
        [stream] = engine.submit([GenerationRequest(f"{left}", [1], params)])
        assert sum(len(update.token_ids) for update in await collect(stream)) == 3
        [stream] = engine.submit([GenerationRequest(f"cut {left}", [1], replace(params, max_tokens=None))])
        os.kill(supervisor.host.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await collect(stream)
        if left:
            await until(lambda: engine.health().alive)
    async with asyncio.timeout(10):
        await keeping
    assert not engine.health().alive
    assert time.time() - 60 < starts[0] < starts[1] < starts[2]
    assert [line for line in lines if "restarts are left" in line] == [
        "starting it again; 1 restarts are left",
        "starting it again; 0 restarts are left",
    ]
    await engine.shutdown(0)


@pytest.mark.usefixtures("scripted")
async def test_an_engine_that_cannot_start_again_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    supervisor = Supervisor(EngineArgs(model="slow"), lines.append, restarts=5)
    engine = await AsyncEngine.launch(supervisor.host, ByteTokenizer())
    supervisor._args = EngineArgs(model="no checkpoint")
    keeping = asyncio.create_task(supervisor.keep_alive(engine))
    os.kill(supervisor.host.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        await keeping
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors[0].startswith("The engine died: its process ")
    assert errors[1:] == ["The engine could not be started again: there is no such model."]
    with pytest.raises(EngineDead):
        engine.submit([GenerationRequest("a", [1], SamplingParams())])
    await engine.shutdown(0)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("restarts", "comes_back"), [(4, True), (2, False)])
async def test_an_engine_that_is_killed_while_it_loads_takes_another_restart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, restarts: int, comes_back: bool
) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.3)
    lines: list[str] = []
    supervisor = Supervisor(EngineArgs(model="slow"), lines.append, restarts=restarts)
    engine = await AsyncEngine.launch(supervisor.host, ByteTokenizer())
    supervisor._args = EngineArgs(model="killed")
    keeping = asyncio.create_task(supervisor.keep_alive(engine))
    os.kill(supervisor.host.pid, signal.SIGKILL)

    def failures() -> int:
        return sum("could not be started again" in record.getMessage() for record in caplog.records)

    await until(lambda: failures() == 2)
    supervisor._args = EngineArgs(model="slow")
    if comes_back:
        await until(lambda: engine.health().alive)
        assert "the engine is ready again" in lines
        [stream] = engine.submit([GenerationRequest("a", [1], SamplingParams(max_tokens=3, seed=0, ignore_eos=True))])
        assert sum(len(update.token_ids) for update in await collect(stream)) == 3
    else:
        async with asyncio.timeout(10):
            await keeping
        assert not engine.starts_again
        assert "starting it again; 0 restarts are left" in lines
    keeping.cancel()
    await engine.shutdown(0)


async def test_a_hang_is_asked_about_once_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[str | None] = [None, "one step has taken 200 s", "one step has taken 201 s", None, "again", "again"]
    asked: list[int] = []
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.0)
    monkeypatch.setattr(module, "hang_fault", lambda health: faults.pop(0) if len(faults) > 1 else faults[0])
    supervisor = Supervisor(EngineArgs(), lambda line: None, restarts=0)
    host: Any = supervisor.host
    host.dump_stacks = lambda: asked.append(len(faults))
    async with fake_engine() as engine:
        watching = asyncio.create_task(supervisor.watch_for_hangs(engine))
        await until(lambda: len(faults) == 1)
        await asyncio.sleep(0.01)
        watching.cancel()
    assert asked == [4, 1]
    assert [record.getMessage() for record in caplog.records if "hangs" in record.message] == [
        "The engine hangs: one step has taken 200 s. The stacks of its threads follow.",
        "The engine hangs: again. The stacks of its threads follow.",
    ]
