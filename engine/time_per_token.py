"""What a token takes at each confidence, from what steps and groups have shown. Knows no target and no clock.

A lower confidence emits more tokens a step and makes the step longer. Both are measured: how many tokens a group has at
a confidence, by counting; and what further tokens cost, by how much longer steps of the same number of rows take that
happen to have more of them. So steps of answers at several confidences tell as much as others, and a machine whose
speed drifts is no trouble.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_STEPS = 64  # without prompts, at about the present load
MIN_GROUPS = 64  # at a level
SURE = 0.02  # a ratio that is known to so much, or whose distance from 1 is twice its error, counts as known
_MEMORY_STEPS, _MEMORY_GROUPS = 1024, 4096
_STALL = 3.0  # a step counts as at most so many times the mean of its kind
_BINS_AN_OCTAVE = 8  # up to 12 rows each number is a bin of its own, above that they are 9 % wide
_OCTAVES = (1.0, 2.0, 3.0)  # how far from the present load evidence may lie: the nearest that suffices


@dataclass(slots=True)
class _Cell:
    """Steps of about one number of rows, the older ones fading: sums for a regression of seconds on extra tokens."""

    steps: float = 0.0
    x: float = 0.0  # tokens a row beyond the first, the mean of this step and the one before
    y: float = 0.0  # seconds
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        if self.steps >= 16:
            y = min(y, _STALL * self.y / self.steps)
        kept = 1 - 1 / _MEMORY_STEPS
        self.steps = self.steps * kept + 1
        self.x = self.x * kept + x
        self.y = self.y * kept + y
        self.xx = self.xx * kept + x * x
        self.xy = self.xy * kept + x * y
        self.yy = self.yy * kept + y * y


@dataclass(slots=True)
class _Groups:
    count: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0

    def add(self, num_tokens: int) -> None:
        kept = 1 - 1 / _MEMORY_GROUPS
        self.count = self.count * kept + 1
        self.tokens = self.tokens * kept + num_tokens
        self.squares = self.squares * kept + num_tokens * num_tokens


class TimePerToken:
    """Evidence about levels, which are numbered; what a level is, its owner knows."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}  # bin of rows -> steps
        self._groups: dict[int, _Groups] = {}  # level -> groups
        self._last_extra: float | None = None

    def add_group(self, level: int, num_tokens: int) -> None:
        self._groups.setdefault(level, _Groups()).add(num_tokens)

    def add_step(self, seconds: float, rows: int, tokens: int, *, is_timed: bool = True) -> None:
        """`rows` sequences emitted `tokens` tokens in `seconds`. is_timed: whether the seconds were theirs alone, that
        is, without a prompt's.

        A further token costs a micro-step now and a merge in the next step, so the seconds are put beside the mean of
        two steps: its slope is the sum of both costs, however alike the two steps are.
        """
        extra, last = max(tokens / rows - 1, 0.0), self._last_extra
        self._last_extra = extra
        if is_timed and last is not None:
            self._cells.setdefault(_bin(rows), _Cell()).add((extra + last) / 2, seconds)

    def ratio(self, level: int, other: int, load: float) -> float | None:
        """Time per token at `level` over that at `other`, at about `load` rows a step; None: too little is known.

        A step of g tokens a row takes 1 + cost (g - 1) times one of single tokens.
        """
        ours, theirs, cost = self._group_size(level), self._group_size(other), self._cost(load)
        if ours is None or theirs is None:
            return None
        (size, size_error), (others, others_error) = ours, theirs
        if cost is None:
            return others / size if size <= others else None  # groups that are no larger cannot pay
        value, error = cost
        single, step = 1 + value * (others - 1), 1 + value * (size - 1)
        ratio = step / single * others / size
        # How far the ratio, relative to itself, is off by each of the three errors.
        parts = (
            error * (size - others) / (single * step),
            (1 - value) / step * size_error / size,
            (1 - value) / single * others_error / others,
        )
        uncertain = ratio * math.hypot(*parts)
        return ratio if uncertain <= SURE or abs(1 - ratio) >= 2 * uncertain else None

    def is_known(self, level: int, load: float) -> bool:
        """Whether enough tells of a level, and of steps at about this load, to compare another level with it."""
        return self._group_size(level) is not None and any(
            sum(cell.steps for cell in self._near(load, octaves)) >= MIN_STEPS for octaves in _OCTAVES
        )

    def forget(self, level: int) -> None:
        """Drop what was measured at a level, because it is to be measured anew."""
        self._groups.pop(level, None)

    def _group_size(self, level: int) -> tuple[float, float] | None:
        """The mean, and its standard error."""
        groups = self._groups.get(level)
        if groups is None or groups.count < MIN_GROUPS:
            return None
        mean = groups.tokens / groups.count
        return mean, math.sqrt(max(groups.squares / groups.count - mean * mean, 0.0) / groups.count)

    def _cost(self, load: float) -> tuple[float, float] | None:
        """How much longer, as a share, a step is for one more token a row; and its standard error."""
        for octaves in _OCTAVES:
            cells = self._near(load, octaves)
            steps = sum(cell.steps for cell in cells)
            if steps < MIN_STEPS:
                continue
            # Each cell's numbers are relative to its own mean, so that cells of several loads can be pooled.
            xx = xy = yy = extra = 0.0
            for cell in cells:
                n, y = cell.steps, cell.y / cell.steps
                xx += cell.xx - cell.x * cell.x / n
                xy += (cell.xy - cell.x * cell.y / n) / y
                yy += (cell.yy - cell.y * cell.y / n) / (y * y)
                extra += cell.x
            if xx <= 1e-9 * steps or steps <= len(cells) + 1:
                continue
            slope = xy / xx  # of a mean step
            error = math.sqrt(max(yy - slope * xy, 0.0) / (steps - len(cells) - 1) / xx)
            single = 1 - slope * extra / steps  # of a mean step, what one of single tokens takes
            if single > 0.05:
                return slope / single, error / single
        return None

    def _near(self, load: float, octaves: float) -> list[_Cell]:
        return [cell for key, cell in self._cells.items() if abs(key - _bin(load)) <= octaves * _BINS_AN_OCTAVE]


def _bin(rows: float) -> int:
    return round(_BINS_AN_OCTAVE * math.log2(rows))
