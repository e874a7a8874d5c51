"""What a token takes at each confidence, from what steps and groups have shown. Knows no target and no clock.

A lower confidence emits more tokens a step and makes the step longer. Both are measured: how many tokens a group has at
a confidence, by counting; and what further tokens cost, by how much longer a step takes than the one before it, of the
same number of rows, when it happens to have more of them. So steps of answers at several confidences tell as much as
others. Only neighbours are compared, because the dial turns when steps become slower: beside steps of long ago, the
tokens that it then adds would be blamed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_STEPS = 64  # without prompts, at about the present load
MIN_GROUPS = 64  # at a level
SURE = 0.02  # a ratio that is known to so much, or whose distance from 1 is twice its error, counts as known
_MEMORY_STEPS, _MEMORY_GROUPS = 1024, 4096
_LATE_STEPS = 32
_LEAST_EXTRA = 1e-9  # of squares of tokens a row, for a cost to be looked for
_ALIKE = 1e-6  # of a product of two sums: by how little they differ that always go together
_STALL = 1.0  # two steps differ by at most so much of a step
_BINS_AN_OCTAVE = 8  # up to 12 rows each number is a bin of its own, above that they are 9 % wide
_OCTAVES = (1.0, 2.0, 3.0)  # how far from the present load evidence may lie: the nearest that suffices


@dataclass(frozen=True, slots=True)
class _Step:
    """One without prompts. extra: tokens a row beyond the first; before: those of the step before it."""

    bin: int
    seconds: float
    extra: float
    before: float


class _Cell:
    """Pairs of neighbouring steps of about one number of rows, the older ones fading.

    a: by how many extra tokens two steps differ, b: by how many the steps before them, as a further token costs a
    micro-step now and a merge in the next step. y: by how much time, as a share of the mean of late, which had m extra
    tokens. So y (1 + cost m) = c a + d b, and cost = c + d. `sums`: of products, by their names.
    """

    def __init__(self, first: _Step) -> None:
        self.seconds, self.m = first.seconds, first.extra
        self.pairs = 0.0
        self.sums = [0.0] * 10  # aa, ab, bb, ay, by, amy, bmy, yy, myy, mmyy

    def add(self, last: _Step, step: _Step) -> None:
        a, b = step.extra - last.extra, step.before - last.before
        y = max(-_STALL, min((step.seconds - last.seconds) / self.seconds, _STALL))
        my = self.m * y
        products = (a * a, a * b, b * b, a * y, b * y, a * my, b * my, y * y, my * y, my * my)
        kept = 1 - 1 / _MEMORY_STEPS
        self.sums = [old * kept + new for old, new in zip(self.sums, products, strict=True)]
        self.pairs = self.pairs * kept + 1
        self.seconds += (step.seconds - self.seconds) / _LATE_STEPS
        self.m += (step.extra - self.m) / _LATE_STEPS


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
        self._last_step: _Step | None = None  # that was timed

    def add_group(self, level: int, num_tokens: int) -> None:
        self._groups.setdefault(level, _Groups()).add(num_tokens)

    def add_step(self, seconds: float, rows: int, tokens: int, *, is_timed: bool = True) -> None:
        """`rows` sequences emitted `tokens` tokens in `seconds`. is_timed: whether the seconds were theirs alone, that
        is, without a prompt's.
        """
        extra, last = max(tokens / rows - 1, 0.0), self._last_extra
        self._last_extra = extra
        if is_timed and last is not None:
            before, step = self._last_step, _Step(_bin(rows), seconds, extra, last)
            self._last_step = step
            if before is not None and before.bin == step.bin:
                self._cells.setdefault(step.bin, _Cell(before)).add(before, step)

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
            sum(cell.pairs for cell in self._near(load, octaves)) >= MIN_STEPS for octaves in _OCTAVES
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
            pairs = sum(cell.pairs for cell in cells)
            if pairs < MIN_STEPS:
                continue
            aa, ab, bb, ay, by, amy, bmy, yy, myy, mmyy = map(sum, zip(*(cell.sums for cell in cells), strict=True))
            # a and b are the instruments of a regression on a - m y and b - m y, as the noise of y is on both sides:
            # (p q; r s) (c d) = (ay by).
            p, q, r, s = aa - amy, ab - amy, ab - bmy, bb - bmy
            det, both = p * s - q * r, p + q + r + s
            if abs(det) > _ALIKE * aa * bb:
                u, v = (s - r) / det, (p - q) / det
                c, d = (s * ay - q * by) / det, (p * by - r * ay) / det
            elif both > _LEAST_EXTRA * pairs:  # c and d cannot be told apart, only their sum
                u = v = 2 / both
                c = d = (ay + by) / both
            else:
                continue
            cost = u * ay + v * by
            squares = yy + 2 * cost * myy + cost * cost * mmyy - 2 * (c * (ay + cost * amy) + d * (by + cost * bmy))
            squares += c * c * aa + 2 * c * d * ab + d * d * bb
            return cost, math.sqrt(max(squares, 0.0) / (pairs - 1) * (u * u * aa + 2 * u * v * ab + v * v * bb))
        return None

    def _near(self, load: float, octaves: float) -> list[_Cell]:
        return [cell for key, cell in self._cells.items() if abs(key - _bin(load)) <= octaves * _BINS_AN_OCTAVE]


def _bin(rows: float) -> int:
    return round(_BINS_AN_OCTAVE * math.log2(rows))
