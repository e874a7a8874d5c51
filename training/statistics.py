"""Paired bootstrap intervals of ratios of sums over prompts. Pure functions of arrays and a seed; knows no model.

Every figure of an evaluation is a ratio of sums: nats / tokens, tokens / groups, repeated n-grams / n-grams, answers
that ended / answers. Prompts are drawn anew, and one draw serves both sides of a comparison: that makes it paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Draws = NDArray[np.int64]
Floats = NDArray[np.float64]

_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the interval that holds it; not a number where a denominator was zero."""

    value: float
    low: float
    high: float


class Ratio:
    """sum(numerators) / sum(denominators) over n prompts."""

    def __init__(self, numerators: ArrayLike, denominators: ArrayLike) -> None:
        """Both [n]. Raises ValueError when they are not two vectors of one length, or hold what is no number."""
        self.numerators: Floats = np.asarray(numerators, dtype=np.float64)
        self.denominators: Floats = np.asarray(denominators, dtype=np.float64)
        if self.numerators.ndim != 1 or self.numerators.shape != self.denominators.shape:
            raise ValueError(
                f"numerators {self.numerators.shape} and denominators {self.denominators.shape} must be two vectors "
                "with one entry a prompt."
            )
        if not (np.isfinite(self.numerators).all() and np.isfinite(self.denominators).all()):
            raise ValueError("numerators and denominators must be finite.")

    def __len__(self) -> int:
        return len(self.numerators)

    @property
    def value(self) -> float:
        return float(_divide(self.numerators.sum(), self.denominators.sum()))

    def resampled(self, draws: Draws) -> Floats:
        """[rounds]: the ratio of each draw of prompts."""
        return _divide(self.numerators[draws].sum(-1), self.denominators[draws].sum(-1))


def resample(strata: Sequence[object], rounds: int, seed: int) -> Draws:
    """int64 [rounds, n]: prompts drawn with replacement, from each stratum as many as it has.

    strata: the stratum of each of the n prompts; all the same for a plain bootstrap. Raises ValueError for no prompts
    or no rounds.
    """
    if not strata or rounds < 1:
        raise ValueError(f"{len(strata)} prompts and {rounds} rounds: both must be at least 1.")
    generator = np.random.default_rng(seed)
    draws = np.empty((rounds, len(strata)), dtype=np.int64)
    for stratum in dict.fromkeys(strata):
        members = np.array([i for i, s in enumerate(strata) if s == stratum])
        draws[:, members] = generator.choice(members, size=(rounds, len(members)))
    return draws


def ratio(a: Ratio, draws: Draws, level: float = _LEVEL) -> Interval:
    """A ratio with its percentile interval."""
    return _interval(a.value, a.resampled(draws), level)


def difference(a: Ratio, b: Ratio, draws: Draws) -> Interval:
    """a - b, prompt by prompt the same draw. Raises ValueError when they are not over the same number of prompts."""
    _check_paired(a, b)
    return _interval(a.value - b.value, a.resampled(draws) - b.resampled(draws), _LEVEL)


def quotient(a: Ratio, b: Ratio, draws: Draws) -> Interval:
    """a / b, prompt by prompt the same draw. Raises ValueError when they are not over the same number of prompts."""
    _check_paired(a, b)
    value = float(_divide(np.float64(a.value), np.float64(b.value)))
    return _interval(value, _divide(a.resampled(draws), b.resampled(draws)), _LEVEL)


def _check_paired(a: Ratio, b: Ratio) -> None:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} prompts cannot be paired.")


def _divide(numerators: Floats | np.float64, denominators: Floats | np.float64) -> Floats:
    """Not a number where the denominator is zero."""
    where = np.asarray(denominators, dtype=np.float64)
    quotients: Floats = np.divide(numerators, where, out=np.full(where.shape, np.nan), where=where != 0)
    return quotients


def _interval(value: float, resampled: Floats, level: float) -> Interval:
    """The middle `level` of the draws that gave a number."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}: it must be in (0, 1).")
    known = resampled[~np.isnan(resampled)]
    if not len(known):
        return Interval(value, float("nan"), float("nan"))
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))
