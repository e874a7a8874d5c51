"""A contestant's processes: started, stopped still while others are measured, watched and ended, children included.

Children are found by descent, not by process group: our server gives its engine a session of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

START = Path(__file__).parents[1] / "start.py"  # how a module of a room becomes a program
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECONDS = 0.2
ENDING_SECONDS = 10.0
# Runs the rest of its arguments as a program that the kernel kills when whoever started it is gone.
LEASH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell runs in the background has it ignored, and its children too
os.execvp(sys.argv[1], sys.argv[1:])
"""


class ContestantError(Exception):
    """A contestant that did not start, answer or live; the message is one line for the report."""


def leashed(command: Sequence[str]) -> list[str]:
    """The command, on Linux such that it dies with the thread that starts it, even one that was killed: a process that
    stands still would never notice, and keep its memory."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", LEASH, *command]


class ProcessTree:
    """One process and its children. stdin and stdout are pipes, stderr goes to `log`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                leashed(command),
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only the driver
            )
        self._log = log

    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def pause(self) -> None:
        """Stop all its processes where they are: no thread of theirs spins while another contestant is measured."""
        _signal(self.members(), signal.SIGSTOP)

    def resume(self) -> None:
        _signal(self.members(), signal.SIGCONT)

    def end(self) -> None:
        """Ask it to end, then insist. Safe to call again."""
        members = self.members()  # now: whoever outlives its parent is no descendant any more
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        _signal(members, signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        _signal(members, signal.SIGKILL)
        self._process.wait()
        self.stdin.close()
        self.stdout.close()

    def members(self) -> list[int]:
        """The process and all its descendants that live."""
        return [] if self._process.poll() is not None else descendants(self._process.pid)

    def died(self) -> ContestantError:
        """What to say about a process that ended by itself."""
        try:
            code = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return ContestantError(f"it closed its output; {self._log} says more")
        return ContestantError(f"{ended_with(code)}; {self._log} says more")

    def resident_bytes(self) -> int:
        """Resident memory of all its processes now."""
        return sum(_resident(pid) for pid in self.members())

    @contextmanager
    def watch_memory(self) -> Iterator[list[int]]:
        """Within it, a list whose one entry grows to the highest resident bytes that were seen."""
        peak = [self.resident_bytes()]
        over = threading.Event()

        def watch() -> None:
            while not over.wait(SAMPLE_SECONDS):
                peak[0] = max(peak[0], self.resident_bytes())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield peak
        finally:
            over.set()
            thread.join()


def descendants(root: int) -> list[int]:
    """A process, its children, theirs, and so on: parents first."""
    found, open_ = [], [root]
    while open_:
        pid = open_.pop()
        found.append(pid)
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            for task in Path(f"/proc/{pid}/task").iterdir():
                open_ += [int(child) for child in (task / "children").read_text().split()]
    return found


def ended_with(code: int) -> str:
    """An exit code in words; a negative one is a signal's."""
    with suppress(ValueError):
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0
