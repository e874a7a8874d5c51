"""StepCosts: what a step takes by its rows, measured when the engine starts and corrected while it serves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_FOLLOWS = 0.05  # of what a step took beside what was foretold, that is believed at once
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
    """What was measured, times how much slower steps are now: all of them, and those of about so many rows.

    A busy neighbour and longer contexts slow all steps down, so what is seen of some tells of the others; what is
    particular to a number of rows is forgotten slowly where it is not seen again.
    """

    def __init__(self, measured: MeasuredCosts) -> None:
        self.measured = measured
        self._steps = _ascending(measured.steps)
        self._scale = 1.0
        self._own = [1.0] * len(measured.rows)

    def step(self, rows: float) -> float:
        """Milliseconds of a step of so many rows."""
        at, share = self._between(rows)
        low = self._steps[at] * self._own[at]
        return self._scale * (low + share * (self._steps[at + 1] * self._own[at + 1] - low))

    def micro_step(self, rows: float) -> float:
        """Milliseconds of a micro-step of so many sequences."""
        at, share = self._between(rows)
        low, high = self.measured.micro_steps[at : at + 2]
        return self._scale * max(low + share * (high - low), 0.0)

    def observe(self, rows: int, num_micro_steps: int, num_drafting: int, milliseconds: float) -> None:
        """A step without prompts took so long, with so many micro-steps of num_drafting sequences."""
        foretold = self.step(rows) + num_micro_steps * self.micro_step(num_drafting)
        # One step may be held up by anything: it counts as at most twice what was foretold.
        ratio = min(max(milliseconds / foretold, 0.5), 2.0) ** _FOLLOWS
        self._scale *= ratio
        nearest = min(range(len(self._own)), key=lambda i: abs(self.measured.rows[i] - rows))
        self._own = [own**_FORGETS for own in self._own]
        self._own[nearest] *= ratio

    def _between(self, rows: float) -> tuple[int, float]:
        """The measured number before, and how far towards the next; beyond the last as between the last two."""
        known = self.measured.rows
        at = min(max(bisect_left(known, rows) - 1, 0), len(known) - 2)
        return at, (rows - known[at]) / (known[at + 1] - known[at])


def _ascending(values: Sequence[float]) -> list[float]:
    """No more than those behind: what was in the way of a measurement has only added to it."""
    return list(accumulate(reversed(values), min))[::-1]
