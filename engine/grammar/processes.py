"""GrammarProcesses: tries grammars in processes of their own, so that none of them can hold up or fill this one.

    write ── known already ──► its text
      └────► quick lane (2 processes, .5 s a grammar) ── longer ──► slow lane (1 process, 10 s) ── longer ──► error

A grammar that takes longer than its lane allows, or that all who wait for it have left, ends with its process. So
quick ones never wait for slow ones longer than it takes to notice them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

from hamburger.engine.grammar.matching import NO_END_TOKEN
from hamburger.engine.grammar.source import GrammarSource
from hamburger.engine.process_usage import cpu_seconds
from hamburger.engine.types.errors import InvalidRequest, QueueFull, QueueTimeout

QUICK_SECONDS, SLOW_SECONDS = 0.5, 10.0  # of a processor: beside busy others a grammar takes no more of them
PROCESSES = 2
MOST_QUICK, MOST_SLOW = 1024, 4  # that may wait for a process
MEMORY = 512 << 20  # bytes that a grammar may take
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.05  # between two looks at what a grammar has taken
_PATIENCE_SECONDS = 45.0  # by the clock, for waiting and compiling together
_KNOWN_CHARACTERS = 16 << 20  # of grammars that are remembered
_MOST_WRITTEN = 8 << 20  # bytes; a body is no larger unless the server is set so

_log = logging.getLogger(__name__)


class GrammarFault(RuntimeError):
    """A process that tries grammars failed, and not for the grammar's sake."""


class GrammarProcesses:
    """For one vocabulary. Nothing is started before the first grammar; close() ends what was."""

    def __init__(
        self,
        loader: Sequence[str],
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        quick_seconds: float = QUICK_SECONDS,
        slow_seconds: float = SLOW_SECONDS,
        patience: float = _PATIENCE_SECONDS,
        memory: int = MEMORY,
        compact_json: bool = False,
    ) -> None:
        """loader: `module:function` and its arguments, which give the tokenizer. memory: bytes that compiling may
        take. patience: seconds by the clock for waiting and compiling. compact_json: all sources are
        compact, whatever they say. Otherwise as for Grammars."""
        hello = {
            "loader": list(loader), "vocab_size": vocab_size, "eos_token_ids": sorted(eos_token_ids), "memory": memory,
        }  # fmt: skip
        self._too_large = f"The grammar takes more than {memory >> 20} MiB to compile: ask for less at once."
        self._threads = ThreadPoolExecutor(PROCESSES + 1, thread_name_prefix="hamburger-grammar")
        self._compact_json = compact_json
        self._has_ends, self._slow_seconds, self._patience = bool(eos_token_ids), slow_seconds, patience
        self._lanes = [
            _Lane([_Process(json.dumps(hello).encode()) for _ in range(number)], seconds, most, self._threads)
            for number, seconds, most in ((PROCESSES, quick_seconds, MOST_QUICK), (1, slow_seconds, MOST_SLOW))
        ]
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by digests of their sources
        self._known_characters = 0
        self._trials: dict[bytes, _Trial] = {}

    async def write(self, source: GrammarSource) -> str:
        """Its text, once it has been compiled. Raises InvalidRequest, without a field, for one that cannot be used or
        takes too long or too much, QueueFull and QueueTimeout where others keep it waiting, and GrammarFault."""
        if not self._has_ends:
            raise InvalidRequest(NO_END_TOKEN)
        try:
            compact = source.compact or self._compact_json
            data = json.dumps({"kind": source.kind, "value": source.value, "compact": compact})[:-1].encode()
        except RecursionError as error:
            raise InvalidRequest("The schema is nested too deeply: use fewer levels.") from error
        if len(data) > _MOST_WRITTEN:
            raise InvalidRequest(f"The grammar is larger than {_MOST_WRITTEN >> 20} MiB: ask for less at once.")
        key = blake2b(data, digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = _Trial(asyncio.create_task(self._try(key, data)))
        trial.number += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.number -= 1
            if not trial.number and not trial.task.done():  # all have left
                del self._trials[key]
                trial.task.cancel()

    async def _try(self, key: bytes, data: bytes) -> str:
        try:
            async with asyncio.timeout(self._patience):
                for lane in self._lanes:
                    if (grammar := await lane.write(data)) is not None:
                        break
                else:
                    raise InvalidRequest(
                        f"The grammar takes longer than {self._slow_seconds:g} s to compile: ask for less at once."
                    )
        except TimeoutError:
            raise QueueTimeout(
                f"The grammar was not compiled within {self._patience:g} s beside what else runs here: try again "
                "later, or ask for less at once.",
                math.ceil(self._slow_seconds),
            ) from None
        except _TooLarge:
            raise InvalidRequest(self._too_large) from None
        finally:
            if (trial := self._trials.get(key)) is not None and trial.task is asyncio.current_task():
                del self._trials[key]
        self._known[key] = grammar
        self._known_characters += len(grammar)
        while self._known_characters > _KNOWN_CHARACTERS:
            self._known_characters -= len(self._known.popitem(last=False)[1])
        return grammar

    def close(self) -> None:
        """End the processes; who still waits gets GrammarFault."""
        for lane in self._lanes:
            lane.close()
        self._threads.shutdown(wait=False)


class _TooLarge(Exception):
    pass


class _Trial:
    """One grammar that is being tried, for so many who wait."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task = task
        self.number = 0


class _Lane:
    """Some processes, each for one grammar at a time, which may take so many seconds. most_waiting: for a process."""

    def __init__(
        self, processes: list[_Process], seconds: float, most_waiting: int, threads: ThreadPoolExecutor
    ) -> None:
        self._all, self._seconds, self._threads = tuple(processes), seconds, threads
        self._free, self._most = processes, len(processes) + most_waiting
        self._number = 0  # that wait or are tried
        self._seats = asyncio.Semaphore(len(processes))

    async def write(self, data: bytes) -> str | None:
        """None for one that takes longer. Raises InvalidRequest, QueueFull and GrammarFault."""
        if self._number >= self._most:
            raise QueueFull("Too many grammars are being compiled: try again later.", math.ceil(self._seconds))
        self._number += 1
        try:
            return await self._write(data)
        finally:
            self._number -= 1

    async def _write(self, data: bytes) -> str | None:
        async with self._seats:
            process, given_up = self._free.pop(), threading.Event()
            work = partial(process.write, data, self._seconds, given_up)
            tried = asyncio.get_running_loop().run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(tried)
            except asyncio.CancelledError:
                given_up.set()
                process.kill()
                while not tried.done():  # soon, now; whoever says so once more, its thread still has the process
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([tried])
                tried.exception()  # nobody is told
                raise
            finally:
                self._free.append(process)

    def close(self) -> None:
        for process in self._all:
            process.end()


class _Running(NamedTuple):
    connection: Connection
    process: subprocess.Popen[bytes]
    end: Callable[[], int | None]


class _Process:
    """One process, which is started when it is needed and there is none."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def write(self, data: bytes, seconds: float, given_up: threading.Event) -> str | None:
        """As _Lane.write; blocks. data: JSON of a GrammarSource, but for its last brace. given_up: nobody waits."""
        connection, pid = self._connection()
        if given_up.is_set():
            return None
        try:
            connection.send_bytes(data + b', "seconds": %g}' % seconds)
            most = cpu_seconds(pid) + seconds
            while not connection.poll(_LOOK_SECONDS):
                if cpu_seconds(pid) > most:
                    self.end()
                    return None
            answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            code = self.end()
            if code is not None and -code in (signal.SIGABRT, signal.SIGSEGV):
                # The library ends its process where it gets no memory.
                raise _TooLarge from error
            raise GrammarFault("A process that tries grammars has ended.") from error
        if answer.get("is_too_large"):
            raise _TooLarge
        if "fault" in answer:
            _log.error("a grammar could not be tried:\n%s", answer["fault"])
            raise GrammarFault("A grammar could not be tried.")
        if "refused" in answer:
            raise InvalidRequest(answer["refused"])
        return str(answer["grammar"])

    def _connection(self) -> tuple[Connection, int]:
        running = self._running
        if running is not None:
            with contextlib.suppress(OSError):
                if not running.connection.poll():
                    return running.connection, running.process.pid
            self.end()  # it says nothing unasked: it has ended
        connection, process = _start()
        with self._lock:
            self._running = _Running(connection, process, weakref.finalize(self, _end, connection, process))
        try:
            connection.send_bytes(self._hello)
            if connection.poll(_START_SECONDS) and "ready" in json.loads(connection.recv_bytes()):
                return connection, process.pid
        except (EOFError, OSError):
            pass
        self.end()
        raise GrammarFault("A process that tries grammars did not start.")

    def kill(self) -> None:
        """Whatever it is doing, without waiting; from any thread. Who waits for it then ends it."""
        if (running := self._running) is not None:
            running.process.kill()

    def end(self) -> int | None:
        """From any thread. Its exit code; None if there was none any more."""
        with self._lock:
            running, self._running = self._running, None
        return None if running is None else running.end()


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HAMBURGER_")}
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hamburger.engine.grammar.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what the library says of memory that it did not get
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # a tokenizer may need it
        )
    return ours, process


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.kill()
    code = process.wait()
    connection.close()
    return code
