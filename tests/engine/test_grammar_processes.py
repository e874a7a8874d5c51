"""Processes that try grammars: what takes too long or too much ends with its process, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from engines_of_servers import children
from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.grammar.processes import MOST_SLOW, GrammarFault, GrammarProcesses, _Lane
from hamburger.engine.grammar.source import GrammarSource
from hamburger.engine.types.errors import InvalidRequest, QueueFull, QueueTimeout
from processes import gone

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def bomb(number: int = 0) -> GrammarSource:
    """Seconds of work; each number another one."""
    multiples = [{"type": "integer", "multipleOf": 90_001 + 2 * i} for i in range(number, number + 10)]
    return GrammarSource("json", {"anyOf": multiples})


@asynccontextmanager
async def processes(**limits: Any) -> AsyncIterator[GrammarProcesses]:
    tried = GrammarProcesses(ByteTokenizer().loader, VOCAB_SIZE, [EOS], **limits)
    try:
        yield tried
    finally:
        tried.close()


def running() -> list[int]:
    return children(os.getpid(), "hamburger.engine.grammar.worker")


async def ended(pids: list[int]) -> None:
    """Wait until nothing of them is left but that they are to be waited for: their files are closed then, too."""
    for pid in pids:
        await gone(pid)


async def until_running(number: int) -> None:
    async with asyncio.timeout(20):
        while len(running()) != number:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource("json", PERSON),
        GrammarSource("json", None),
        GrammarSource("json_text", '{"type": "boolean"}'),
        GrammarSource("regex", "[a-c]{2,5}"),
        GrammarSource("choice", ["yes", "no"]),
        GrammarSource("json", PERSON, compact=True),
        GrammarSource("calls", ("start: args0", [PERSON]), compact=True),
        GrammarSource("grammar", 'start: "a" | "b"'),
        GrammarSource("grammar", 'root ::= "a" | "b"'),
    ],
)
async def test_the_text_is_what_the_writers_write(source: GrammarSource) -> None:
    async with processes() as tried:
        assert await tried.write(source) == source.write()
        for pid in running():
            os.kill(pid, signal.SIGKILL)
        assert await tried.write(source) == source.write()  # it is remembered
    assert not running()


async def test_all_json_is_compact_where_the_server_says_so() -> None:
    async with processes(compact_json=True) as tried:
        calls = GrammarSource("calls", ("start: args0", [PERSON]))
        for source in (GrammarSource("json", PERSON), calls, GrammarSource("regex", "a")):
            assert await tried.write(source) == replace(source, compact=True).write()
            assert (source.write() == replace(source, compact=True).write()) is (source.kind == "regex")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (GrammarSource("regex", "(a"), "cannot be used"),
        (GrammarSource("json", {"type": "no-such"}), "cannot be used|cannot be read"),
        (GrammarSource("json_text", "{"), "is no JSON"),
        (GrammarSource("json_text", "3"), "no JSON Schema"),
        (GrammarSource("choice", ["a" * 600_000]), "at most 500,000"),
        (GrammarSource("regex", "a" * (9 << 20)), "larger than 8 MiB"),
    ],
)
async def test_what_cannot_be_used_is_said(source: GrammarSource, named: str) -> None:
    async with processes() as tried:
        with pytest.raises(InvalidRequest, match=named):
            await tried.write(source)


async def test_slow_ones_are_refused_and_quick_ones_do_not_wait_for_them() -> None:
    async with processes(quick_seconds=0.3, slow_seconds=1.0, patience=600) as tried:
        await tried.write(GrammarSource("json", PERSON))
        slow = [asyncio.create_task(tried.write(bomb(i))) for i in range(3)]
        await asyncio.sleep(0)
        assert await tried.write(GrammarSource("regex", "[a-c]{2,5}"))
        assert not slow[-1].done()  # it is still at it
        for task in slow:
            with pytest.raises(InvalidRequest, match="takes longer than 1 s"):
                await task
        assert await tried.write(GrammarSource("regex", "[a-d]{2,5}"))


async def test_too_many_slow_ones_are_refused_and_the_others_wait_on() -> None:
    async with processes(quick_seconds=0.1, slow_seconds=60, patience=600) as tried:
        slow = {asyncio.create_task(tried.write(bomb(20 * i))) for i in range(MOST_SLOW + 3)}
        waiting = set(slow)
        while not (refused := {task for task in slow - waiting if isinstance(task.exception(), QueueFull)}):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert len(waiting) >= MOST_SLOW + 1  # one is tried, and so many wait
        [error] = {task.exception() for task in refused}
        assert isinstance(error, QueueFull)
        assert error.retry_after == 60
        assert await tried.write(GrammarSource("regex", "[a-c]{2,5}"))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await tried.write(GrammarSource("regex", "[a-d]{2,5}"))


async def test_who_waits_too_long_is_told_so_and_its_process_is_free() -> None:
    async with processes(quick_seconds=0.1, slow_seconds=60, patience=2) as tried:  # before it takes too much memory
        slow = [asyncio.create_task(tried.write(bomb(20 * i))) for i in range(3)]
        for task in slow:
            with pytest.raises(QueueTimeout, match="not compiled within 2 s"):
                await task
        await until_running(0)
        tried._patience = 60.0  # it has to be started again
        assert await tried.write(GrammarSource("regex", "[a-c]{2,5}"))


async def test_who_leaves_ends_its_grammar() -> None:
    async with processes(quick_seconds=60) as tried:
        task = asyncio.create_task(tried.write(bomb()))
        await until_running(1)
        await asyncio.sleep(0.5)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_running(0)
        assert time.monotonic() - began < 5  # it takes far longer
        assert await tried.write(GrammarSource("json", PERSON))


async def test_several_wait_for_one_trial_and_one_may_leave() -> None:
    async with processes(quick_seconds=60) as tried:
        source = GrammarSource("json", {"type": "integer", "multipleOf": 9_001})
        first, second, third = (asyncio.create_task(tried.write(source)) for _ in range(3))
        await until_running(1)
        first.cancel()
        grammar = await second
        assert grammar == await third == source.write()
        assert len(running()) == 1
        with contextlib.suppress(asyncio.CancelledError):
            await first


async def test_a_newcomer_does_not_get_the_end_of_those_who_left() -> None:
    async with processes(quick_seconds=60) as tried:
        source = GrammarSource("json", {"type": "integer", "multipleOf": 9_001})
        left = asyncio.create_task(tried.write(source))
        await until_running(1)
        left.cancel()
        await asyncio.sleep(0)
        assert await tried.write(source) == source.write()
        with contextlib.suppress(asyncio.CancelledError):
            await left


class Held:
    """Stands for a process that is not rid of at once."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def write(self, data: bytes, seconds: float, given_up: threading.Event) -> str | None:
        self.began.set()
        assert self.may_end.wait(10)
        return None if given_up.is_set() else data.decode()

    def kill(self) -> None:
        """It takes its time."""


async def test_who_is_told_to_leave_twice_keeps_the_process_until_it_is_free() -> None:
    """As where patience ends, and the last who waits leaves at once."""
    held = Held()
    with ThreadPoolExecutor(2) as threads:
        lane = _Lane([held], 1.0, 1, threads)  # type: ignore[list-item]
        left = asyncio.create_task(lane.write(b"left"))
        await asyncio.to_thread(held.began.wait, 10)
        for _ in range(2):
            left.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        assert not left.done()
        held.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert await lane.write(b"next") == "next"


async def test_what_takes_too_much_memory_is_refused() -> None:
    async with processes(quick_seconds=60, memory=64 << 20) as tried:
        with pytest.raises(InvalidRequest, match="takes more than 64 MiB"):
            await tried.write(bomb())
        assert await tried.write(GrammarSource("regex", "[a-c]{2,5}"))


async def test_a_process_that_somebody_ends_is_a_fault_and_the_next_one_is_another() -> None:
    async with processes(quick_seconds=60) as tried:
        task = asyncio.create_task(tried.write(bomb()))
        await until_running(1)
        await asyncio.sleep(0.5)
        os.kill(running()[0], signal.SIGKILL)
        with pytest.raises(GrammarFault):
            await task
        assert await tried.write(GrammarSource("json", PERSON))


async def test_one_that_ended_while_idle_is_started_again() -> None:
    async with processes() as tried:
        await tried.write(GrammarSource("json", PERSON))
        pids = running()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await ended(pids)
        assert await tried.write(GrammarSource("json", None))


async def test_a_tokenizer_that_cannot_be_loaded_is_a_fault() -> None:
    tried = GrammarProcesses(("no.such.module:f",), VOCAB_SIZE, [EOS])
    with pytest.raises(GrammarFault, match="did not start"):
        await tried.write(GrammarSource("json", None))
    tried.close()
    assert not running()


async def test_without_an_end_token_nothing_is_started() -> None:
    tried = GrammarProcesses(ByteTokenizer().loader, VOCAB_SIZE, [])
    with pytest.raises(InvalidRequest, match="no end token"):
        await tried.write(GrammarSource("json", None))
    assert not running()
