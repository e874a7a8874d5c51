"""Several engines, each a process of its own: one cannot be launched, one dies, all are ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable

import pytest

from async_engine import collect
from engine_builders import BUILDER
from hamburger.engine.hosts.process_host import ProcessHost, Worker
from hamburger.engine.logs import LogFormat
from hamburger.engine.request import GenerationRequest
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.transport.cpu_placement import CpuPlacement
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import EngineDead
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import BUILTIN
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.launch import FoundModel, engine_arguments, find_models, running_models
from hamburger.server.load_settings import load_settings
from hamburger.server.operation import supervisor as module
from processes import gone, is_alive, let_workers_find_builders
from serving import until


class Hosts:
    """The hosts that supervisors made, in their order; their engines are those of engine_builders."""

    def __init__(self) -> None:
        self.made: list[ProcessHost] = []

    def __call__(
        self,
        args: EngineArgs,
        on_progress: Callable[[str], None],
        log_level: str,
        log_format: LogFormat,
        worker: Worker | None,
        placement: CpuPlacement,
    ) -> ProcessHost:
        self.made.append(ProcessHost(args, on_progress, BUILDER, log_level, log_format, worker, placement))
        return self.made[-1]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    let_workers_find_builders(monkeypatch)
    hosts = Hosts()
    monkeypatch.setattr(module, "ProcessHost", hosts)
    return hosts


def found(name: str, kind: str, restarts: int = 0) -> FoundModel:
    settings = ServeSettings(engine_restarts=restarts)
    return FoundModel(name, settings, EngineArgs(model=kind), Tokenizer.load(BUILTIN))


def request(name: str, max_tokens: int | None = None) -> GenerationRequest:
    return GenerationRequest(name, [1], SamplingParams(seed=0, ignore_eos=True, max_tokens=max_tokens))


async def test_a_killed_engine_takes_its_own_requests_along_and_no_others(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    async with running_models([found("a", "slow"), found("b", "slow")], lines.append) as [a, b]:
        assert hosts.made[0].pid != hosts.made[1].pid
        [cut] = b.context.engine.submit([request("cut")])
        [whole] = a.context.engine.submit([request("whole", max_tokens=20)])
        os.kill(hosts.made[1].pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            await collect(cut)
        assert sum(len(update.token_ids) for update in await collect(whole)) == 20
        async with asyncio.timeout(10):
            await b.supervision
        assert not a.supervision.done()
        assert a.context.engine.health().alive
        assert any(record.getMessage().startswith("The engine of b died") for record in caplog.records)
        assert any(line.startswith("a: building") for line in lines)
    for host in hosts.made:
        await gone(host.pid)


async def test_each_engine_has_its_own_restarts(hosts: Hosts) -> None:
    async with running_models([found("a", "slow", 1), found("b", "slow", 1)], lambda line: None) as [a, b]:
        for killed, model in ((hosts.made[0], a), (hosts.made[1], b)):
            os.kill(killed.pid, signal.SIGKILL)
            await model.context.engine.stopped()
            await until(lambda model=model: model.context.engine.health().alive)  # type: ignore[misc]
        assert len(hosts.made) == 4
        assert not a.supervision.done()
        assert not b.supervision.done()


async def test_a_worker_that_was_started_before_is_the_first_engine_alone(hosts: Hosts) -> None:
    with Worker(BUILDER) as worker:
        async with running_models([found("a", "slow", 1), found("b", "slow")], lambda line: None, worker) as [a, _]:
            first, second = hosts.made
            assert first.pid == worker.process.pid != second.pid
            os.kill(first.pid, signal.SIGKILL)
            await a.context.engine.stopped()
            await until(lambda: a.context.engine.health().alive)
            assert len({host.pid for host in hosts.made}) == 3
    for host in hosts.made:
        await gone(host.pid)


@pytest.mark.parametrize(("kind", "said"), [("no config", "b: max_model_len is 9"), ("no checkpoint", "b: there is")])
async def test_what_cannot_be_launched_is_named_and_ends_the_others(hosts: Hosts, kind: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        async with running_models([found("a", "slow"), found("b", kind)], lambda line: None):
            pass
    assert len(hosts.made) == 2
    for host in hosts.made:
        await gone(host.pid)


async def test_they_are_launched_one_after_another(hosts: Hosts) -> None:
    lines: list[str] = []
    launching = asyncio.create_task(_launch([found("a", "long to load"), found("b", "slow")], lines.append))
    await until(lambda: bool(lines))
    assert lines == ["a: building long to load"]
    assert is_alive(hosts.made[0].pid)
    launching.cancel()
    await asyncio.gather(launching, return_exceptions=True)
    assert len(hosts.made) == 1
    await gone(hosts.made[0].pid)
    await hosts.made[0].join()  # else nobody hears of its end


async def _launch(models: list[FoundModel], progress: Callable[[str], None]) -> None:
    async with running_models(models, progress):
        pass


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"served_model_name": "m", "lora": "m@0.5=/x"}, "m@0.5, which is m with a confidence"),
        ({"also": "b=builtin", "lora": "b@.25=/x"}, "b@.25, which is b with"),
        ({"lora": "a@7=/x; a=/y"}, "a@7, which is a with"),
        ({"also": "b=builtin,lora=a=/x", "lora": "a@1=/y"}, "a@1, which is a with"),
        ({"also": "b=builtin", "lora": "b=/x"}, "have the name b: rename it"),
    ],
)
def test_no_adapter_has_the_name_of_another_or_its_alias(given: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(told)):
        find_models(engine_arguments(load_settings(given)))


def test_an_adapters_name_may_have_an_at_that_is_no_alias() -> None:
    given = {"served_model_name": "m", "lora": "m@v2=/x; n@0.5=/y"}
    assert [model.name for model in find_models(engine_arguments(load_settings(given)))] == ["m"]
