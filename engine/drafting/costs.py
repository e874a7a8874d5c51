"""StepCosts: what a step takes by its rows, measured when the engine starts and corrected while it serves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_FOLLOWS = 0.02  # of what a number of rows took beside what was foretold, that is believed at once
_MEMORY = 0.995  # of what the steps before told of all, that is still believed
# What counts as a step that took what was measured, and as further rows and micro-steps that are slower now by as much
# as steps are: before much is known, or where all steps are alike, what slows them must not be laid to one of these.
_PRIOR_STEP, _PRIOR_ROWS, _PRIOR_MICRO_STEP = 0.1, 0.1, 0.1
_LEAST_MICRO_STEP = 0.001  # of a step of one row
_WITHOUT_WEIGHS = 24.0  # a step without micro-steps, beside one with them: few are, where drafts pay
_FORGETS = 0.999  # of what one number of rows took beside the others, that is still believed a step later


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
    """What was measured, times how much slower a step of one row, further rows and micro-steps are now, and steps of
    about so many rows.

    A busy neighbour and longer contexts slow all steps down, so what is seen of some tells of the others; one that
    takes memory bandwidth slows the reading of weights, which one row needs as well, and so no further row. What is
    particular to a number of rows is forgotten slowly where it is not seen again.
    """

    def __init__(self, measured: MeasuredCosts) -> None:
        self.measured = measured
        self._steps = _ascending(measured.steps)
        # Differences of what was measured, so some may be lost in its noise: none is less than those of fewer rows.
        least = _LEAST_MICRO_STEP * self._steps[0]
        self._micro_steps = list(accumulate(measured.micro_steps, max, initial=least))[1:]
        self._own = [1.0] * len(measured.rows)
        self._now = _Factors()

    def step(self, rows: float) -> float:
        """Milliseconds of a step of so many rows."""
        now, one = self._now, self._steps[0]
        return now.step * one + now.rows * (self._usual(rows) - one)

    def _usual(self, rows: float) -> float:
        """As it was measured, and as it is for about so many rows."""
        at, share = self._between(rows)
        low, high = self._steps[at] * self._own[at], self._steps[at + 1] * self._own[at + 1]
        if share > 1 and high < low:  # the last are seldom seen: further rows take no less for it
            return high
        return low + share * (high - low)

    def micro_step(self, rows: float) -> float:
        """Milliseconds of a micro-step of so many sequences."""
        at, share = self._between(rows)
        low, high = self._micro_steps[at : at + 2]
        return self._now.micro_step * max(low + share * (high - low), 0.0)

    def observe(self, rows: int, num_micro_steps: int, num_drafting: int, milliseconds: float) -> None:
        """A step without prompts took so long, with so many micro-steps of num_drafting sequences."""
        one, now = self._steps[0], self._now
        parts = one, self._usual(rows) - one, num_micro_steps * self.micro_step(num_drafting) / now.micro_step
        foretold = now.step * parts[0] + now.rows * parts[1] + now.micro_step * parts[2]
        # One step may be held up by anything: it counts as at most twice what was foretold.
        ratio = min(max(milliseconds / foretold, 0.5), 2.0)
        self._own = [own**_FORGETS for own in self._own]
        if not num_micro_steps:  # else nobody can say whether rows or micro-steps took it
            nearest = min(range(len(self._own)), key=lambda i: abs(self.measured.rows[i] - rows))
            self._own[nearest] *= ratio**_FOLLOWS
        now.add((parts[0] / foretold, parts[1] / foretold, parts[2] / foretold), ratio)

    def _between(self, rows: float) -> tuple[int, float]:
        """The measured number before, and how far towards the next; beyond the last as between the last two."""
        known = self.measured.rows
        at = min(max(bisect_left(known, rows) - 1, 0), len(known) - 2)
        return at, (rows - known[at]) / (known[at + 1] - known[at])


class _Factors:
    """Least squares, fading: step, rows and micro_step times the parts that were measured is what steps took."""

    def __init__(self) -> None:
        self.step = self.rows = self.micro_step = 1.0
        self._squares = [0.0] * 6  # of the three parts: 0 0, 0 1, 0 2, 1 1, 1 2, 2 2
        self._took = [0.0] * 3

    def add(self, parts: tuple[float, float, float], took: float) -> None:
        """A step took so much; parts, as they were measured: of one row, of further ones, and micro-steps."""
        x, y, z = parts
        weight = 1.0 if z else _WITHOUT_WEIGHS
        seen = x * x, x * y, x * z, y * y, y * z, z * z
        self._squares = [_MEMORY * old + weight * new for old, new in zip(self._squares, seen, strict=True)]
        self._took = [_MEMORY * old + weight * part * took for old, part in zip(self._took, parts, strict=True)]
        xx, xy, xz, yy, yz, zz = self._squares
        xx += _PRIOR_STEP + _PRIOR_ROWS + _PRIOR_MICRO_STEP
        xy, yy = xy - _PRIOR_ROWS, yy + _PRIOR_ROWS
        xz, zz = xz - _PRIOR_MICRO_STEP, zz + _PRIOR_MICRO_STEP
        xt, yt, zt = self._took[0] + _PRIOR_STEP, self._took[1], self._took[2]
        # By Cramer's rule; the priors keep the determinant above 0.
        minors = yy * zz - yz * yz, xz * yz - xy * zz, xy * yz - xz * yy
        determinant = xx * minors[0] + xy * minors[1] + xz * minors[2]
        of_rows, of_both, of_micro = xx * zz - xz * xz, xy * xz - xx * yz, xx * yy - xy * xy
        self.step = max((minors[0] * xt + minors[1] * yt + minors[2] * zt) / determinant, 0.05)
        self.rows = max((minors[1] * xt + of_rows * yt + of_both * zt) / determinant, 0.05)
        self.micro_step = max((minors[2] * xt + of_both * yt + of_micro * zt) / determinant, 0.05)


def _ascending(values: Sequence[float]) -> list[float]:
    """No more than those behind: what was in the way of a measurement has only added to it."""
    return list(accumulate(reversed(values), min))[::-1]
