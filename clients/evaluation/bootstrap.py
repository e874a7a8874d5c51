"""Percentile bootstrap intervals for a mean and for the mean difference of two paired series. Pure: numbers in, out.

Items are drawn with replacement, and a pair always stays together, so what makes an item hard for both series cancels.
Knows nothing of tasks or servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hamburger.clients.evaluation.errors import EvalError

SAMPLES, LEVEL = 10_000, 0.95
_DRAWS_AT_ONCE = 2_000_000  # bounds the memory: 16 MB of indices


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the two ends of its interval."""

    value: float
    low: float
    high: float


def bootstrap_mean(values: Sequence[float], *, samples: int = SAMPLES, level: float = LEVEL, seed: int = 0) -> Interval:
    """The mean of `values` with its percentile interval from `samples` resamples.

    Same arguments, same interval. Raises EvalError for no values, values that are not finite, or options out of range.
    """
    if samples < 1:
        raise EvalError(f"samples is {samples}: give a whole number from 1 up.")
    if not 0 < level < 1:
        raise EvalError(f"level is {level}: give a number between 0 and 1, such as 0.95.")
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not data.size:
        raise EvalError("values is empty: an interval needs at least one item.")
    if not np.isfinite(data).all():
        raise EvalError("values holds NaN or infinity: leave such items out, or score them as 0.")
    tail = (1 - level) / 2
    low, high = np.quantile(_resampled_means(data, samples, seed), [tail, 1 - tail])
    return Interval(float(data.mean()), float(low), float(high))


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], *, samples: int = SAMPLES, level: float = LEVEL, seed: int = 0
) -> Interval:
    """mean(a) - mean(b) with its percentile interval; a[i] and b[i] are scores of the same item i.

    Raises EvalError as bootstrap_mean does, and for series of different lengths.
    """
    if len(a) != len(b):
        raise EvalError(f"a has {len(a)} scores and b has {len(b)}: pair them item by item.")
    return bootstrap_mean([x - y for x, y in zip(a, b, strict=True)], samples=samples, level=level, seed=seed)


def _resampled_means(data: NDArray[np.float64], samples: int, seed: int) -> NDArray[np.float64]:
    """[samples] float64: the mean of each resample."""
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWS_AT_ONCE // data.size)
    parts = [
        data[generator.integers(data.size, size=(min(rows, samples - start), data.size))].mean(axis=1)
        for start in range(0, samples, rows)
    ]
    return np.concatenate(parts)
