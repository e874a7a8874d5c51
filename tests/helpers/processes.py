"""Engines in processes of their own, for tests: whether one lives, and how to start one that engine_builders builds."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from engine_builders import BUILDER
from hamburger.engine.hosts.process_host import ProcessHost
from hamburger.engine.types.config import EngineArgs


def host_of(model: str, lines: list[str] | None = None) -> ProcessHost:
    """An engine of engine_builders.build; `lines` collects its progress."""
    return ProcessHost(EngineArgs(model=model), (lines if lines is not None else []).append, BUILDER)


def let_workers_find_builders(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while is_alive(pid):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
