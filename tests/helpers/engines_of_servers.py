"""Open streams of a real server, and the processes behind it, for tests that end some of them."""

from __future__ import annotations

import contextlib
import threading
import time
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

    def __init__(self, server: RealServer, number: int) -> None:
        self.endings: list[list[str]] = []
        self.ended_at: list[float] = []
        self._server = server
        self._threads = [threading.Thread(target=self._read) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._server.url}/v1/completions", json=ENDLESS, timeout=60) as response:
            lines = [line for line in response.iter_lines() if line]
        self.ended_at.append(time.monotonic())
        self.endings.append(lines[-2:])

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
