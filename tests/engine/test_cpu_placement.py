"""The server's process keeps off the cores where engines' first threads run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from async_engine import collect
from engine_builders import BUILDER
from fakes import ByteTokenizer
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.hosts.process_host import ProcessHost
from hamburger.engine.request import GenerationRequest
from hamburger.engine.transport.cpu_placement import CpuPlacement
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.sampling_params import SamplingParams
from processes import let_workers_find_builders

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not place threads")


@pytest.fixture(autouse=True)
def cores() -> Iterator[set[int]]:
    """Those that this process may use, before and after."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    yield before
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(int(task.name), before)


class Engines:
    """Where scripted engines run, and what time it is."""

    def __init__(self) -> None:
        self.cpus: dict[int, int] = {}
        self.now = 100.0
        self.looks = 0

    def cpu_of(self, pid: int) -> int | None:
        self.looks += 1
        return self.cpus.get(pid)

    def placement(self) -> CpuPlacement:
        return CpuPlacement(self.cpu_of, lambda: self.now)


def test_it_follows_one_engine(cores: set[int]) -> None:
    engines = Engines()
    placement = engines.placement()
    first, second = sorted(cores)[:2]
    engines.cpus[7] = first
    placement.follow(7)
    assert os.sched_getaffinity(0) == cores - {first}
    engines.cpus[7] = second
    placement.follow(7)
    assert os.sched_getaffinity(0) == cores - {first}, "looked up again within the same moment"
    assert engines.looks == 1
    engines.now += 0.06
    placement.follow(7)
    assert os.sched_getaffinity(0) == cores - {second}
    placement.forget(7)
    assert os.sched_getaffinity(0) == cores


def test_all_threads_are_placed(cores: set[int]) -> None:
    engines = Engines()
    engines.cpus[7] = min(cores)
    seen: list[set[int]] = []
    may_look, placement = threading.Event(), engines.placement()

    def look() -> None:
        assert may_look.wait(10)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=look)
    thread.start()
    placement.follow(7)
    may_look.set()
    thread.join(10)
    assert seen == [cores - {min(cores)}]


def test_engines_on_all_cores_leave_it_where_it_was(cores: set[int]) -> None:
    engines = Engines()
    placement = engines.placement()
    for pid, cpu in enumerate(sorted(cores)):
        engines.cpus[pid] = cpu
        placement.follow(pid)
    assert os.sched_getaffinity(0) == cores
    engines.now += 1.0  # all but the first have been at rest since
    placement.follow(0)
    assert os.sched_getaffinity(0) == cores - {min(cores)}


def test_what_is_started_meanwhile_may_use_all_cores(cores: set[int]) -> None:
    engines = Engines()
    engines.cpus[7] = min(cores)
    placement = engines.placement()
    placement.follow(7)
    placement.go_everywhere()
    command = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    assert subprocess.check_output(command, text=True).strip() == str(sorted(cores))
    engines.now += 0.06
    placement.follow(7)
    assert os.sched_getaffinity(0) == cores - {min(cores)}


async def test_an_engine_is_followed_while_it_steps_and_its_successor_has_all_cores(
    cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_workers_find_builders(monkeypatch)
    engines = Engines()
    placement = engines.placement()
    hosts = [ProcessHost(EngineArgs(model="slow"), builder=BUILDER, placement=placement) for _ in range(2)]
    engine = await AsyncEngine.launch(hosts[0], ByteTokenizer())
    try:
        assert os.sched_getaffinity(0) == cores
        engines.cpus[hosts[0].pid] = min(cores)
        params = SamplingParams(max_tokens=3, seed=0, ignore_eos=True)
        [stream] = engine.submit([GenerationRequest("a", [1], params)])
        await collect(stream)
        assert os.sched_getaffinity(0) == cores - {min(cores)}
        hosts[1].start(lambda event: None)
        assert os.sched_getaffinity(hosts[1].pid) == cores
        hosts[1].abandon()
        await hosts[1].join()
    finally:
        await engine.shutdown(0)
    assert os.sched_getaffinity(0) == cores


def test_a_real_process(cores: set[int]) -> None:
    cpu = max(cores)
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(process.pid, {cpu})
        placement = CpuPlacement()
        deadline = time.monotonic() + 10
        while cpu in os.sched_getaffinity(0) and time.monotonic() < deadline:
            placement.follow(process.pid)
            time.sleep(0.06)
        assert os.sched_getaffinity(0) == cores - {cpu}
    finally:
        process.kill()
        process.wait()
    placement.follow(process.pid)  # one that has gone is no error
