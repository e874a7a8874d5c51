"""On which core the server's process runs beside engines that compute on the CPU.

The threads of an engine's step, one a core, wait actively for each other; between two steps its first thread alone has
something to do. What the server does of a step falls just there, if it runs on another core than that thread. The
system does not know that: as often as not it puts both on one, and the other core waits for nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LOOK_SECONDS = 0.05  # between two looks; the system seldom moves a thread that computes
_AT_WORK_SECONDS = 0.5  # since a look at it: an engine at rest takes no core
_PROCESSOR = 36  # its place in /proc/PID/stat, counted behind the name (proc(5), field 39)


class CpuPlacement:
    """Keeps this process off the cores where the first threads of working engines run, within those that it had at
    first. Where the system does not tell (other than Linux) or no core would be left, it does nothing.

    One for all engines of a process; not for several threads.
    """

    def __init__(
        self, cpu_of: Callable[[int], int | None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """cpu_of: the core on which a process's first thread runs, None for one that has gone."""
        self._cpu_of, self._clock = cpu_of or _cpu_of, clock
        self._all = self._present = _allowed()
        self._engines: dict[int, tuple[int, float]] = {}  # the core of each, and when that was looked up

    def follow(self, pid: int) -> None:
        """An engine's process has ended a step."""
        now = self._clock()
        known = self._engines.get(pid)
        if len(self._all) < 2 or (known is not None and now - known[1] < _LOOK_SECONDS):
            return
        if (cpu := self._cpu_of(pid)) is None:
            return
        self._engines[pid] = cpu, now
        taken = {cpu for cpu, seen in self._engines.values() if now - seen < _AT_WORK_SECONDS}
        self._place((self._all - taken) or self._all)

    def forget(self, pid: int) -> None:
        """That process has ended."""
        self._engines.pop(pid, None)
        if not self._engines:
            self.go_everywhere()

    def go_everywhere(self) -> None:
        """Until the next step ends. What is started meanwhile may use all cores, too."""
        self._place(self._all)

    def _place(self, cpus: set[int]) -> None:
        if cpus == self._present:
            return
        self._present = cpus
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has ended, or none of these cores is this process's any more
                os.sched_setaffinity(int(task.name), cpus)


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _cpu_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_PROCESSOR])
    except (OSError, ValueError, IndexError):
        return None
