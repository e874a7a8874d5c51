"""What a token took at each confidence and load, measured step by step. Knows no target and no clock.

A lower confidence emits more tokens a step and makes the step longer. Whether that pays depends on the machine and on
how many rows a step has, so only steps of the same load are compared, and only those of the same minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_STEPS = 64  # at either level, at loads that both have seen
PAIRED_SECONDS = 120.0  # measured further apart than this, two figures tell of the machine, not of the confidence
_MEMORY_STEPS = 512
_BINS_AN_OCTAVE = 8  # up to 12 rows each number is a bin of its own, above that they are 9 % wide
_OCTAVES = 1.0  # how far from the present load evidence may lie


@dataclass(slots=True)
class _Cell:
    """Steps of one level and load, the older ones fading. log_seconds: a sum; a stalled step hardly moves its mean."""

    steps: float = 0.0
    log_seconds: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0
    time: float = 0.0

    def add(self, time: float, seconds: float, rows: int, tokens: int) -> None:
        kept = 1 - 1 / _MEMORY_STEPS
        self.steps = self.steps * kept + 1
        self.log_seconds = self.log_seconds * kept + math.log(seconds)
        self.rows = self.rows * kept + rows
        self.tokens = self.tokens * kept + tokens
        self.time = time

    @property
    def log_time_per_token(self) -> float:
        return self.log_seconds / self.steps - math.log(self.tokens / self.rows)


class TimePerToken:
    """Evidence about levels, which are numbered; what a level is, its owner knows."""

    def __init__(self) -> None:
        self._cells: dict[int, dict[int, _Cell]] = {}  # level -> bin of load -> what was measured

    def add(self, level: int, time: float, seconds: float, rows: int, tokens: int) -> None:
        """One step that computed no prompt: `rows` sequences emitted `tokens` tokens in `seconds`. time: seconds."""
        cells = self._cells.setdefault(level, {})
        cells.setdefault(_bin(rows), _Cell()).add(time, seconds, rows, tokens)

    def ratio(self, level: int, other: int, load: float) -> float | None:
        """Time per token at `level` over that at `other`, at about `load` rows a step; None: too little is known."""
        ours, theirs = self._cells.get(level, {}), self._cells.get(other, {})
        weight = difference = 0.0
        for key in ours.keys() & theirs.keys():
            a, b = ours[key], theirs[key]
            if _is_near(key, load) and abs(a.time - b.time) <= PAIRED_SECONDS:
                steps = min(a.steps, b.steps)
                weight += steps
                difference += steps * (a.log_time_per_token - b.log_time_per_token)
        return math.exp(difference / weight) if weight >= MIN_STEPS else None

    def is_known(self, level: int, load: float, now: float) -> bool:
        """Whether enough steps of late at about this load tell of a level, for another one to be compared with it."""
        cells = self._cells.get(level, {}).items()
        recent = (c.steps for key, c in cells if _is_near(key, load) and now - c.time <= PAIRED_SECONDS)
        return sum(recent) >= MIN_STEPS

    def forget(self, level: int) -> None:
        """Drop what was measured at a level, because it is to be measured anew."""
        self._cells.pop(level, None)


def _is_near(key: int, load: float) -> bool:
    return abs(key - _bin(load)) <= _OCTAVES * _BINS_AN_OCTAVE


def _bin(rows: float) -> int:
    return round(_BINS_AN_OCTAVE * math.log2(rows))
