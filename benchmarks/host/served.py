"""What a benchmark looks at of a real server on this machine: its engine's process, its memory and its metrics."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import httpx


def engine_pid(server: int) -> int:
    """Of a server's process. Raises StopIteration where it has none."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return next(int(pid) for pid in children if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())


def resident_mib(pid: int) -> float:
    """0 for a process that is ending."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) / 1024 if match else 0.0


def metric(text: str, name: str) -> float:
    """The sum of a metric's samples in what /metrics answers; name: without `hamburger_`."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"hamburger_{name}[{{ ]", line))


async def kill_engine(http: httpx.AsyncClient, server: int) -> None:
    """Of a server's process, which starts it again; wait until another is ready."""
    os.kill(engine_pid(server), signal.SIGKILL)
    was_noticed = False
    async with asyncio.timeout(120):
        while True:
            is_ready = (await http.get("/ready")).status_code == 200
            if is_ready and was_noticed:
                return
            was_noticed |= not is_ready
            await asyncio.sleep(0.05)
