"""The engine in a process of its own: the same answers, and every way that it, or the server, can end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from async_engine import collect
from engine_builders import BUILDER
from fakes import ByteTokenizer
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.hosts.process_host import EngineProcessError, ProcessHost, Worker
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import EngineDead, EngineDraining
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ConfigError
from processes import gone, host_of, is_alive, let_workers_find_builders
from reference import expected, random_case

LONG = SamplingParams(seed=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def builders(monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_find_builders(monkeypatch)


@asynccontextmanager
async def engine_of(host: ProcessHost) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.launch(host, ByteTokenizer())
    try:
        yield engine
    finally:
        await engine.shutdown(0)
        assert not is_alive(host.pid)


def endless(number: int) -> list[GenerationRequest]:
    return [GenerationRequest(str(i), [1, 2, 3], LONG) for i in range(number)]


async def test_random_streams_equal_the_reference() -> None:
    lines: list[str] = []
    draw = random.Random(5)
    cases = {str(i): random_case(draw) for i in range(300)}
    async with engine_of(host_of("cases 5", lines)) as engine:
        streams = engine.submit([GenerationRequest(name, case.prompt_ids, case.params) for name, case in cases.items()])
        answers = await asyncio.gather(*map(collect, streams))
    assert lines == ["building cases 5"]
    for case, updates in zip(cases.values(), answers, strict=True):
        want = expected(case)
        assert "".join(update.text for update in updates) == want.text
        assert [token for update in updates for token in update.token_ids] == want.token_ids
        assert (updates[-1].finish_reason, updates[-1].stop_reason) == (want.finish_reason, want.stop_reason)


async def test_a_killed_engine_is_told_to_all_at_once() -> None:
    async with engine_of(host := host_of("slow")) as engine:
        streams = engine.submit(endless(32))
        waiting = [asyncio.create_task(collect(stream)) for stream in streams]
        await anext(aiter(engine.submit([GenerationRequest("x", [1], LONG)])[0]))
        os.kill(host.pid, signal.SIGKILL)
        began = time.monotonic()
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, EngineDead)
            assert "was ended by SIGKILL (out of memory, or killed by hand)" in str(error)
        assert time.monotonic() - began < 2
        health = engine.health()
        assert not health.alive
        assert "SIGKILL" in str(health.error)
        with pytest.raises(EngineDead):
            engine.submit(endless(1))


async def test_an_engines_end_is_heard_while_all_threads_of_the_loop_are_busy() -> None:
    async with engine_of(host := host_of("slow")) as engine:
        [stream] = engine.submit(endless(1))
        loop, go_on = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, go_on.wait, 20)
        try:
            os.kill(host.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                with pytest.raises(EngineDead):
                    await collect(stream)
            assert not busy.done()
        finally:
            go_on.set()
            await busy


def test_ranks_of_an_engine_that_died_leave_no_zombies_where_the_server_is_process_1() -> None:
    # As process 1 of a container, this one gets the children of its children when those end.
    code = """if True:
        import ctypes, os, subprocess
        from hamburger.engine.hosts.process_host import _reap
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        engine = subprocess.Popen(["sh", "-c", "sleep 0.3 & sleep 0.5 & exit 3"], start_new_session=True)
        engine.wait()
        _reap(engine.pid)
        try:
            print("left", os.waitpid(-1, os.WNOHANG))
        except ChildProcessError:
            print("none")
    """
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout == "none\n"


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("raise", "ValueError: a broken kernel"),
        ("linger", "ValueError: a broken kernel"),
        ("exit", r"SystemExit: a library called sys\.exit"),
        ("vanish", "its process [0-9]+ ended with code 7"),
    ],
)
async def test_what_a_step_ends_with_is_told(trouble: str, told: str) -> None:
    async with engine_of(host_of(trouble)) as engine:
        [stream] = engine.submit(endless(1))
        with pytest.raises(EngineDead, match=told):
            await collect(stream)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("no config", ConfigError, "max_model_len is 9: lower it"),
        ("no checkpoint", CheckpointError, "there is no such model"),
        ("broken", EngineProcessError, "RuntimeError: no kernel image"),
    ],
)
async def test_a_failing_build_raises_in_launch(name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        await AsyncEngine.launch(host := host_of(name), ByteTokenizer())
    await gone(host.pid)


@pytest.mark.parametrize("error", [ValueError("no letter for it"), BrokenPipeError("nobody reads")])
async def test_progress_that_nobody_can_tell_stops_no_engine(error: Exception) -> None:
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        raise error

    async with asyncio.timeout(30), engine_of(ProcessHost(EngineArgs(model="slow"), tell, BUILDER)) as engine:
        await anext(aiter(engine.submit(endless(1))[0]))
    assert lines == ["building slow"]


async def test_a_cancelled_launch_ends_the_process() -> None:
    lines: list[str] = []
    host = host_of("long to load", lines)
    task = asyncio.create_task(AsyncEngine.launch(host, ByteTokenizer()))
    async with asyncio.timeout(20):
        while not lines:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(host.pid)
    await host.join()  # so that it was waited for


async def test_draining_ends_what_is_left() -> None:
    async with engine_of(host_of("slow")) as engine:
        [stream] = engine.submit(endless(1))
        await anext(aiter(stream))
        [other] = engine.submit([GenerationRequest("other", [1], LONG)])  # a short one may end before it hears of it
        await engine.shutdown(0)
        with pytest.raises(EngineDraining):
            await collect(other)


async def test_a_hung_engine_shows_in_health_and_writes_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    host = host_of("hang")
    engine = await AsyncEngine.launch(host, ByteTokenizer())
    engine.submit(endless(1))
    async with asyncio.timeout(20):
        while (engine.health().seconds_in_step or 0) < 0.5:  # noqa: ASYNC110 what a watchdog does
            await asyncio.sleep(0.01)
    host.dump_stacks()
    text = ""
    async with asyncio.timeout(20):
        while "hang_for_the_test" not in text:
            await asyncio.sleep(0.01)
            text += capfd.readouterr().err
    host.abandon()
    await engine.shutdown(0)
    await gone(host.pid)


@pytest.mark.parametrize("name", ["hang", "late end"])
async def test_an_engine_that_does_not_end_is_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hamburger.engine.async_engine._STOP_SECONDS", 0.5)
    host = host_of(name)
    engine = await AsyncEngine.launch(host, ByteTokenizer())
    [stream] = engine.submit([GenerationRequest("a", [1], LONG)])
    reading = asyncio.create_task(collect(stream))
    async with asyncio.timeout(20):
        while engine.health().seconds_in_step is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.shutdown(0)
        with pytest.raises(EngineDraining, match="shutting down"):
            await reading
        await gone(host.pid)


async def test_a_request_that_cannot_be_sent_leaves_nothing() -> None:
    async with engine_of(host_of("slow")) as engine:
        good = GenerationRequest("good", [1], SamplingParams(max_tokens=3, seed=0, ignore_eos=True))
        with pytest.raises((OverflowError, UnicodeEncodeError)):
            engine.submit([good, GenerationRequest("bad", [1], LONG, priority=2**70)])
        [stream] = engine.submit([replace(good, request_id="again")])
        assert (await collect(stream))[-1].completion_tokens == 3
        async with asyncio.timeout(10):
            while engine.health().num_running or engine.health().num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_an_engine_that_starts_again_during_a_shutdown_is_ended() -> None:
    engine = await AsyncEngine.launch(host_of("slow"), ByteTokenizer())
    engine.drain()
    host = host_of("slow")
    with pytest.raises(EngineDraining):
        await engine.restart(host)
    await gone(host.pid)
    await engine.shutdown(0)


SERVER = """
import asyncio, os, sys
from engine_builders import BUILDER
from fakes import ByteTokenizer
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.hosts.process_host import ProcessHost
from hamburger.engine.types.sampling_params import SamplingParams

async def main():
    host = ProcessHost(EngineArgs(model=sys.argv[1]), lambda line: None, BUILDER)
    engine = await AsyncEngine.launch(host, ByteTokenizer())
    engine.submit([GenerationRequest("a", [1], SamplingParams(seed=0, ignore_eos=True))])
    while engine.health().seconds_in_step is None:
        await asyncio.sleep(0.001)
    assert "torch" not in sys.modules
    print(host.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("engine", ["slow", "hang"])
async def test_no_engine_outlives_its_server(engine: str) -> None:
    await gone(await asyncio.to_thread(engine_of_a_killed_server, engine))


def engine_of_a_killed_server(engine: str) -> int:
    with subprocess.Popen([sys.executable, "-c", SERVER, engine], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert is_alive(pid)
        server.kill()
    return pid


ALONE = """
import os
from engine_builders import BUILDER
from hamburger.engine.hosts.process_host import Worker

print(Worker(BUILDER).process.pid, flush=True)
os._exit(1)
"""


async def test_a_worker_that_never_got_an_engine_ends() -> None:
    with Worker(BUILDER) as worker:
        assert is_alive(worker.process.pid)
    assert worker.process.returncode == -signal.SIGKILL
    # With the server, too, if that is killed before it has said what to build.
    said = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ALONE], stdout=subprocess.PIPE, check=False)
    await gone(int(said.stdout))


async def test_a_ctrl_c_in_the_terminal_is_not_the_engines() -> None:
    async with engine_of(host := host_of("slow")) as engine:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(host.pid, number)
        [stream] = engine.submit([GenerationRequest("a", [1], SamplingParams(max_tokens=5, seed=0, ignore_eos=True))])
        assert (await collect(stream))[-1].completion_tokens == 5
        assert os.getpgid(host.pid) != os.getpgid(0)
