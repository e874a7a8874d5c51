"""StepCosts: what a step takes by its rows, measured when the engine starts and corrected while it serves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_FOLLOWS = 0.02  # of what a number of rows took beside what was foretold, that is believed at once
_MEMORY = 0.995  # of what the steps before told of all, that is still believed
# What counts as a step that took what was measured, and as micro-steps that are slower now by as much as steps are: a
# step is slower by its context and by the host's work, and before much is known that must not be laid to micro-steps.
_PRIOR_STEP, _PRIOR_MICRO_STEP = 0.1, 0.1
_LEAST_MICRO_STEP = 0.001  # of a step of one row
_WITHOUT_WEIGHS = 24.0  # a step without micro-steps, beside one with them: few are, where drafts pay
_FORGETS = 0.97  # of what one number of rows took beside the others, that is still believed so many steps later:
_FORGETS_EVERY = 32


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Milliseconds at ascending numbers of rows, the first of which is 1.

    steps[i]: of a step of rows[i] slots that drafts nothing. micro_steps[i]: of one further micro-step of rows[i]
    sequences.
    """

    rows: tuple[int, ...]
    steps: tuple[float, ...]
    micro_steps: tuple[float, ...]


class StepCosts:
    """What was measured, times how much slower steps and micro-steps are now, and steps of about so many rows.

    A busy neighbour and longer contexts slow all steps down, so what is seen of some tells of the others; what is
    particular to a number of rows is forgotten slowly where it is not seen again.
    """

    def __init__(self, measured: MeasuredCosts) -> None:
        self.measured = measured
        self._steps = _ascending(measured.steps)
        # Differences of what was measured, so some may be lost in its noise: none is less than those of fewer rows.
        least = _LEAST_MICRO_STEP * self._steps[0]
        self._micro_steps = list(accumulate(measured.micro_steps, max, initial=least))[1:]
        self._own = [1.0] * len(measured.rows)
        self._num_steps = 0
        self._now = _Factors()

    def step(self, rows: float) -> float:
        """Milliseconds of a step of so many rows."""
        at, share = self._between(rows)
        low, high = self._steps[at] * self._own[at], self._steps[at + 1] * self._own[at + 1]
        if share > 1 and high < low:  # the last are seldom seen: further rows take no less for it
            return self._now.step * high
        return self._now.step * (low + share * (high - low))

    def micro_step(self, rows: float) -> float:
        """Milliseconds of a micro-step of so many sequences."""
        at, share = self._between(rows)
        low, high = self._micro_steps[at : at + 2]
        return self._now.micro_step * max(low + share * (high - low), 0.0)

    def observe(self, rows: int, num_micro_steps: int, num_drafting: int, milliseconds: float) -> None:
        """A step without prompts took so long, with so many micro-steps of num_drafting sequences."""
        step, micro = self.step(rows), num_micro_steps and num_micro_steps * self.micro_step(num_drafting)
        # One step may be held up by anything: it counts as at most twice what was foretold.
        ratio = min(max(milliseconds / (step + micro), 0.5), 2.0)
        self._num_steps += 1
        if self._num_steps % _FORGETS_EVERY == 0:
            self._own = [own**_FORGETS for own in self._own]
        if not micro:  # else nobody can say whether rows or micro-steps took it
            at, share = self._between(rows)
            self._own[at + (share > 0.5)] *= ratio**_FOLLOWS
        self._now.add(step / (step + micro), micro / (step + micro), ratio)

    def _between(self, rows: float) -> tuple[int, float]:
        """The measured number before, and how far towards the next; beyond the last as between the last two."""
        known = self.measured.rows
        at = min(max(bisect_left(known, rows) - 1, 0), len(known) - 2)
        return at, (rows - known[at]) / (known[at + 1] - known[at])


class _Factors:
    """Least squares, fading: step and micro_step times what is foretold of both is what steps took."""

    def __init__(self) -> None:
        self.step, self.micro_step = 1.0, 1.0
        self._xx = self._xy = self._yy = self._xt = self._yt = 0.0  # x: steps, y: micro-steps

    def add(self, step: float, micro_step: float, took: float) -> None:
        """A step took so much, of which step and micro_step were foretold for its parts."""
        x, y = step / self.step, micro_step / self.micro_step
        weight = 1.0 if y else _WITHOUT_WEIGHS
        self._xx = _MEMORY * self._xx + weight * x * x
        self._xy = _MEMORY * self._xy + weight * x * y
        self._yy = _MEMORY * self._yy + weight * y * y
        self._xt = _MEMORY * self._xt + weight * x * took
        self._yt = _MEMORY * self._yt + weight * y * took
        a, b = _PRIOR_STEP, _PRIOR_MICRO_STEP
        xx, xy, yy, xt, yt = self._xx + a + b, self._xy - b, self._yy + b, self._xt + a, self._yt
        determinant = xx * yy - xy**2
        self.step = max((xt * yy - yt * xy) / determinant, 0.05)
        self.micro_step = max((yt * xx - xt * xy) / determinant, 0.05)


def _ascending(values: Sequence[float]) -> list[float]:
    """No more than those behind: what was in the way of a measurement has only added to it."""
    return list(accumulate(reversed(values), min))[::-1]
