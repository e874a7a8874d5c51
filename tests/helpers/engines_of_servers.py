"""Open streams of a real server, and the processes behind it, for tests that end some of them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from real_server import RealServer

OPTIONS = ("--served-model-name", "burger", "--dtype", "float32", "--kv-cache-memory", "64MiB")
ENDLESS: dict[str, Any] = {
    "model": "burger",
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "confidence": 1.0,
    "stream": True,
}


def engine_pid(server: RealServer) -> int:
    [engine] = children(server.pid, "hamburger.engine.worker")
    return engine


def children(pid: int, module: str) -> list[int]:
    """The processes that any thread of `pid` has started to run a module."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or a process that ends meanwhile
            for child in (task / "children").read_text().split():
                if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def until(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


class Streams:
    """Open streams, each read to its end by a thread of its own."""

    def __init__(self, server: RealServer, number: int, **fields: Any) -> None:
        """fields: those of the request that are not ENDLESS's."""
        self.endings: list[list[str]] = []
        self.ended_at: list[float] = []
        self._server = server
        self._body = {**ENDLESS, **fields}
        self._threads = [threading.Thread(target=self._read) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=120, verify=False) as response:
            lines = [line for line in response.iter_lines() if line]
        self.ended_at.append(time.monotonic())
        self.endings.append(lines[-2:])

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)

    @property
    def are_open(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)


@contextmanager
def in_the_middle(
    server: RealServer, engines: Sequence[int], start: Callable[[], Sequence[Streams]], number: int
) -> Iterator[Sequence[Streams]]:
    """Streams of which `number` answers have begun and none can end meanwhile, for the engines stand still.

    On a crowded machine some are through before the last has begun; then there are others.
    """
    streams: Sequence[Streams] = ()

    def go_on() -> None:
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):  # the test has ended it
                os.kill(pid, signal.SIGCONT)

    def stand_still() -> bool:
        nonlocal streams
        streams = start()
        while server.metric("hamburger_num_requests_running") < number:
            if not any(stream.are_open for stream in streams):
                return False
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)  # for what the engines have said to arrive
        all_run = server.metric("hamburger_num_requests_running") == number
        if not all_run:
            go_on()
            for stream in streams:
                stream.join()
        return all_run

    until(stand_still, 90)
    try:
        yield streams
    finally:
        go_on()
