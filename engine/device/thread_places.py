"""On which cores the threads of a step run. Knows no model.

A step's threads wait for each other some hundred times, actively. A system that shares the processor by groups of
processes, as Linux does by sessions, puts two of them on one core where a group beside them keeps another one busy:
then each of these waits lasts until that core changes hands, and a step a hundred times as long. So each thread but the
first, which the system may move, has a core of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Sequence

from hamburger.model.cpu.library import Kernels


class ThreadPlaces:
    """Keeps a step's other threads off the core on which its first one, which calls, runs."""

    def __init__(
        self, tie: Callable[[Sequence[int]], object], cpus: Collection[int], cpu_of_caller: Callable[[], int]
    ) -> None:
        """tie: puts each thread but the first on one of so many cores. cpus: as many as there are threads."""
        self._tie, self._cpus, self._cpu_of_caller = tie, sorted(cpus), cpu_of_caller
        self._first: int | None = None  # the core that is left to the first thread

    def follow(self, *, anew: bool = False) -> None:
        """A step of all threads begins. anew: some of them may have been made since."""
        cpu = self._cpu_of_caller()
        if (cpu != self._first or anew) and cpu in self._cpus:
            self._first = cpu
            self._tie([other for other in self._cpus if other != cpu])


def thread_places(kernels: Kernels, num_threads: int) -> ThreadPlaces | None:
    """None where there are not as many cores as threads, so that the system has a choice, or nothing can be tied."""
    if not hasattr(os, "sched_getaffinity") or num_threads < 2:
        return None
    cpus, cpu_of_caller = os.sched_getaffinity(0), getattr(ctypes.CDLL(None), "sched_getcpu", None)
    if len(cpus) != num_threads or cpu_of_caller is None:
        return None
    function = kernels.function("tie_threads", ctypes.c_void_p, ctypes.c_int64)

    def tie(others: Sequence[int]) -> None:
        function((ctypes.c_int64 * len(others))(*others), len(others))

    return ThreadPlaces(tie, cpus, cpu_of_caller)
