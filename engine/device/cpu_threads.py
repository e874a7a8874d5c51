"""How many threads the steps of a CPU take, where other programs want its cores, too. Knows no model.

The threads of a step wait for each other some hundred times. Where another program keeps a core busy, each wait may
last until the system lets the thread on that core run again, and one thread less is several times as fast. So when the
system takes cores away from this process, fewer threads are tried, in turns with the present number, and the faster
number stays; from time to time one more is tried. Results do not depend on it: an output is one thread's work.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hamburger.engine.device.control_groups import granted_cpus
from hamburger.engine.device.thread_places import ThreadPlaces

logger = logging.getLogger(__name__)

_WINDOW_SECONDS = 0.3  # of steps, over which involuntary switches are counted
_SWITCHES_A_SECOND = 10.0  # a machine of one's own has about one, a core shared with a busy program some hundred
_TURN_STEPS = 3
_TURNS = 12  # of both numbers together
_GAIN = 0.93  # of the time that a step took before; less is noise
_CLEAR = 1.5  # times as long, either way: as many turns of both tell enough
_FIRST_REST, _LONGEST_REST = 5.0, 120.0  # seconds until a trial that changed nothing is made again


def threads_of_rank(number: int, num_ranks: int, granted: Callable[[], float | None] = granted_cpus) -> int:
    """One rank's part of torch's threads, at least one.

    A container's CPU limit is a share of time, of which torch sees nothing: with a thread for each of the host's cores
    all would stand still for most of it. Where OMP_NUM_THREADS is set, it has the last word.
    """
    if not os.environ.get("OMP_NUM_THREADS") and (cpus := granted()) is not None:
        number = min(number, int(cpus))
    return max(1, number // num_ranks)


def involuntary_switches() -> int:
    """How often the system has taken a core from a thread of this process that wanted to go on."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class _Trial:
    """Steps in turns: of the present number of threads, two of one more or less (`change`), two of the present one, and
    so on, so that batches which grow or shrink meanwhile favour neither."""

    def __init__(self, change: int) -> None:
        self.change = change
        self._steps = 0
        self._seconds = [0.0, 0.0]  # of both, added up

    @property
    def present_change(self) -> int:
        """0 or `change`: of the next step."""
        return self.change if self._is_others_turn else 0

    @property
    def _is_others_turn(self) -> bool:
        return (self._steps // _TURN_STEPS + 1) // 2 % 2 == 1

    def add(self, seconds: float) -> None:
        self._seconds[self._is_others_turn] += seconds
        self._steps += 1

    @property
    def ratio(self) -> float:
        """The other number's time over the present one's."""
        return self._seconds[1] / self._seconds[0]

    @property
    def has_ended(self) -> bool:
        whole_turns, rest = divmod(self._steps, _TURN_STEPS)
        is_even = not rest and whole_turns > 0 and not whole_turns % 2
        return is_even and (whole_turns == _TURNS or not 1 / _CLEAR < self.ratio < _CLEAR)


class StepThreads:
    """Chooses the number of threads of each step. For one thread that runs steps one after the other."""

    def __init__(
        self,
        get_number: Callable[[], int],
        set_number: Callable[[int], object],
        *,
        clock: Callable[[], float] = time.perf_counter,
        switches: Callable[[], int] = involuntary_switches,
        places: ThreadPlaces | None = None,
    ) -> None:
        """What get_number gives outside of steps is the most that steps take; it is in force again after each.

        places: where the threads run, if all of them do.
        """
        self._places = places
        self._get_number, self._set_number = get_number, set_number
        self._clock, self._switches = clock, switches
        self.number = self._most = self.taken = get_number()  # taken: by the last step
        self._trial: _Trial | None = None
        self._rest = {-1: _FIRST_REST, 1: _FIRST_REST}
        self._not_before = {-1: float("-inf"), 1: float("-inf")}
        self._has_watched = False
        self._begin_window()

    @property
    def is_undecided(self) -> bool:
        """Whether it tries another number, or has not watched long enough to know whether it should."""
        return self._trial is not None or not self._has_watched

    @contextmanager
    def step(self, *, decodes: bool) -> Iterator[None]:
        """Around a step. decodes: it computes no prompt, and so takes about as long as others do."""
        most = self._get_number()
        if most != self._most:
            self.number = self._most = most
            self._trial = self._places = None  # both were for another number
        trial = self._trial if decodes else None
        before = self.taken
        self.taken = wanted = self.number + (0 if trial is None else trial.present_change)
        if self._places is not None and wanted == most:
            self._places.follow(anew=before != most)
        began = self._clock()
        if wanted == most:
            yield
        else:
            self._set_number(wanted)
            try:
                yield
            finally:
                self._set_number(most)
        seconds = self._clock() - began
        if self._trial is None:
            self._watch(seconds)
        elif trial is not None:
            trial.add(seconds)
            if trial.has_ended:
                self._settle(trial)

    def _begin_window(self) -> None:
        # Asked for once a window: a step would notice what the system takes to tell it.
        self._window_seconds, self._switches_before = 0.0, self._switches()

    def _watch(self, seconds: float) -> None:
        self._window_seconds += seconds
        if self._window_seconds < _WINDOW_SECONDS:
            return
        self._has_watched = True
        is_disturbed = self._switches() - self._switches_before > _SWITCHES_A_SECOND * self._window_seconds
        self._begin_window()
        now = self._clock()
        if is_disturbed and self.number > 1 and now >= self._not_before[-1]:
            self._trial = _Trial(-1)
        elif self.number < self._most and now >= self._not_before[1]:
            self._trial = _Trial(1)

    def _settle(self, trial: _Trial) -> None:
        self._trial = None
        self._begin_window()
        change, now = trial.change, self._clock()
        if trial.ratio < _GAIN:
            self.number += change
            self._rest = {-1: _FIRST_REST, 1: _FIRST_REST}
            self._not_before = {change: now, -change: now + _FIRST_REST}
            logger.info(
                "Steps now take %d of %d threads, which makes them %.1f times as fast.",
                self.number, self._most, 1 / trial.ratio,
            )  # fmt: skip
        else:
            self._not_before[change] = now + self._rest[change]
            self._rest[change] = min(2 * self._rest[change], _LONGEST_REST)
