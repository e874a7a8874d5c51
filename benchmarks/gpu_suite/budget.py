"""The time of one call of gpu.py, and programs that get a part of it and leave nothing behind when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from comparison.processes import ended_with, leashed

GRACE = 5.0  # seconds between asking a program to end and killing it


class OutOfTime(BaseException):
    """The call's time is over, whatever it was waiting for."""


class ScriptError(Exception):
    """A program that failed or took too long: the message is one line. output: what it had printed until then."""

    def __init__(self, reason: str, output: str) -> None:
        super().__init__(reason)
        self.output = output


@dataclass(frozen=True, slots=True)
class Budget:
    """whole: seconds from `started` (time.monotonic()) to the end; the last `reserve` are for ending processes and for
    plots."""

    whole: float
    started: float
    reserve: float

    def left(self) -> float:
        return self.started + self.whole - self.reserve - time.monotonic()

    def part(self, share: float) -> float:
        """At most this share of the whole, at least a second."""
        return max(1.0, min(self.left(), share * self.whole))

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Within it, in the main thread, OutOfTime is raised soon after nothing is left. Every wait has its own limit,
        which comes first and tells more; this is for those that nobody thought of."""

        def over(number: int, frame: FrameType | None) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, over)
        signal.setitimer(signal.ITIMER_REAL, max(0.1, self.left() + self.reserve / 8))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def run_within(
    command: Sequence[str],
    seconds: float,
    *,
    stdout: IO[bytes],
    stderr: IO[bytes] | int,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ask: bool = False,
) -> int:
    """Its exit code. ask: it is sent Ctrl-C before it is killed. Raises TimeoutExpired. Its session ends with it."""
    process = subprocess.Popen(leashed(command), stdout=stdout, stderr=stderr, env=env, cwd=cwd, start_new_session=True)
    try:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            if ask:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_script(name: str, command: Sequence[str], seconds: float, logs: Path) -> str:
    """What a program prints; it and what it says besides are kept in `logs`. Raises ScriptError."""
    output, log = logs / f"{name}.out", logs / f"{name}.log"
    reason = None
    with output.open("wb") as stdout, log.open("wb") as stderr:
        try:
            if code := run_within(command, seconds, stdout=stdout, stderr=stderr):
                reason = ended_with(code)
        except subprocess.TimeoutExpired:
            reason = f"it did not end within {seconds:.0f} s"
    printed = output.read_text(encoding="utf-8", errors="replace")
    if reason is None:
        return printed
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise ScriptError(": ".join([reason, *(line[:300] for line in last)]), printed)
