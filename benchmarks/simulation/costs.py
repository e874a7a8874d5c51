"""What one engine step costs: a linear model, fitted by least squares to measured steps of the real model. No torch.

seconds = table[rows in the batch]                  weights and everything else a row; linear between its knots
        + a * rows that emit                        the trunk's head
        + b * slots attended by one-slot rows       their context lengths, summed
        + c * query-slot pairs of prompt chunks     + d * slots of the chunks' contexts
        + e * micro-steps                           + f * rows in them, summed

and, before it, so much for each chunk of old tokens that settles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hamburger.engine.core.batch import ScheduledBatch

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computed, as far as its time depends on it. single_*: of sequences that bring one slot."""

    rows: int
    emitting: int
    single_context_slots: int
    chunk_pairs: int
    chunk_context_slots: int
    micro_steps: int
    micro_rows: int


TERMS = tuple(field.name for field in fields(StepWork))[1:]


def work_of(batch: ScheduledBatch, group_sizes: Iterable[int]) -> StepWork:
    """group_sizes: of the sequences that emit. A group of n tokens took n - 1 micro-steps."""
    sizes = [*group_sizes]
    single = pairs = chunk = 0
    for item in batch.sequences:
        end = item.sequence.num_computed_slots + item.num_slots
        if item.num_slots == 1:
            single += end
        else:
            pairs += item.num_slots * end
            chunk += end
    micro_rows = sum(sizes) - len(sizes)
    return StepWork(batch.num_slots, len(sizes), single, pairs, chunk, max(sizes, default=1) - 1, micro_rows)


@dataclass(frozen=True, slots=True)
class CostModel:
    """knots, table: rows -> seconds. terms: seconds for one of each of TERMS. error: what `residual` said of it.

    settled_chunk: seconds that it takes for one to settle.
    """

    knots: tuple[int, ...]
    table: tuple[float, ...]
    terms: dict[str, float]
    error: dict[str, float]
    settled_chunk: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Predicted time of a step."""
        values = astuple(work)
        total = self._rows(work.rows)
        for name, value in zip(TERMS, values[1:], strict=True):
            total += self.terms[name] * value
        return total

    def _rows(self, rows: int) -> float:
        at = min(max(bisect_right(self.knots, rows) - 1, 0), len(self.knots) - 2)
        low, high = self.knots[at], self.knots[at + 1]
        return self.table[at] + (self.table[at + 1] - self.table[at]) * (rows - low) / (high - low)

    def times(self, factor: float) -> CostModel:
        """The same on a machine that takes this many times as long."""
        terms = {name: value * factor for name, value in self.terms.items()}
        table = tuple(value * factor for value in self.table)
        return replace(self, table=table, terms=terms, settled_chunk=factor * self.settled_chunk)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CostModel:
        table, terms, error = tuple(data["table"]), dict(data["terms"]), dict(data["error"])
        return cls(tuple(data["knots"]), table, terms, error, data.get("settled_chunk", 0.0))


def fit(works: Sequence[StepWork], seconds: Sequence[float]) -> CostModel:
    """Least squares of relative errors. What came out below zero is no cost: it is left out, and the others are fitted
    again; so no step costs less for more work. Raises ValueError where the steps are too few for the coefficients."""
    knots = _knots([work.rows for work in works])
    matrix, times = np.stack([_features(work, knots) for work in works]), np.array(seconds)
    if len(works) < matrix.shape[1]:
        raise ValueError(f"{len(works)} measured steps do not determine {matrix.shape[1]} coefficients.")
    weighted = matrix / times[:, None]
    scales = np.abs(weighted).max(axis=0)
    kept = [column for column in range(matrix.shape[1]) if scales[column] > 0]
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, kept] / scales[kept], np.ones(len(works)), rcond=None)
        below = [column for column, value in zip(kept, found, strict=True) if value < 0]
        if not below:
            break
        kept = [column for column in kept if column not in below]
    coefficients = np.zeros(matrix.shape[1])
    coefficients[kept] = found / scales[kept]
    table, terms = np.cumsum(coefficients[: len(knots)]), coefficients[len(knots) :]
    model = CostModel(knots, tuple(map(float, table)), dict(zip(TERMS, map(float, terms), strict=True)), {})
    return CostModel(knots, model.table, model.terms, residual(model, works, seconds))


def residual(model: CostModel, works: Sequence[StepWork], seconds: Sequence[float]) -> dict[str, float]:
    """How far predictions are off: relative errors, r_squared, and bias: predicted over measured time of all steps."""
    times = np.array(seconds)
    predicted = np.array([model.seconds(work) for work in works])
    relative = np.abs(predicted / times - 1)
    return {
        "steps": len(works),
        "median_relative_error": float(np.median(relative)),
        "p90_relative_error": float(np.percentile(relative, 90)),
        "r_squared": float(1 - ((predicted - times) ** 2).sum() / max(((times - times.mean()) ** 2).sum(), 1e-30)),
        "bias": float(predicted.sum() / times.sum()),
    }


def _knots(rows: Sequence[int]) -> tuple[int, ...]:
    """The knots that the measured numbers of rows can tell apart: each but the first has rows of its own below it."""
    knots = [KNOTS[0]]
    for knot in KNOTS[1:]:
        if any(knots[-1] < n <= knot for n in rows):
            knots.append(knot)
    return tuple(knots) if len(knots) > 1 else KNOTS[:2]


def _features(work: StepWork, knots: tuple[int, ...]) -> NDArray[np.float64]:
    """A column a knot, what it adds to the one before it as far as the rows reach there; then one for each of TERMS."""
    steps = [1.0]
    for low, high in pairwise(knots):
        share = max(0.0, (work.rows - low) / (high - low))
        steps.append(share if high == knots[-1] else min(share, 1.0))
    return np.array([*steps, *astuple(work)[1:]], dtype=np.float64)
