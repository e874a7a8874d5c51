"""SlotScores: how much attention answer tokens got from later ones, by slot. Settling goes by it.

A step's rows are recorded first, [rows, slots], and count once it is known that they are no rejected drafts. A row adds
its part by itself, one row after the other, so that sums do not depend on how tokens share steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch

_Ints = npt.NDArray[np.int64]

NEAREST = 9  # attention to the tokens just before is not counted: nearly all of it is of being near


def middle_layers(num_layers: int) -> tuple[int, ...]:
    """Three layers spread over the middle of a trunk, which tell as much as all: of 30 layers 8, 15 and 22."""
    return tuple(dict.fromkeys(round(num_layers * share) for share in (0.27, 0.5, 0.74)))


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Of a step's T rows. paid: float32 [kv heads, T, W], what each row's query heads paid to slot first + w of its
    sequence, summed over heads and layers, for w below the row's number. sequences, firsts, numbers: int64 [T], the
    batch's sequence of each row, the first slot that counts, and how many do: those that lie NEAREST or more before.
    """

    paid: Tensor
    sequences: _Ints
    firsts: _Ints
    numbers: _Ints
    block_tables: _Ints


class SlotScores:
    """One score a slot of the pool, on the CPU. layers: whose attention counts."""

    def __init__(self, num_slots: int, block_size: int, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.recording: Recording | None = None
        self.values: npt.NDArray[np.float32] = np.zeros(num_slots, dtype=np.float32)
        self._block_size = block_size

    def begin(self, batch: ForwardBatch, kv_heads: int) -> Recording | None:
        """What this step is to record; None where no sequence of it settles. New slots begin at 0."""
        self.recording = None
        if batch.score_from is None:
            return None
        self.values[batch.write_slots.numpy()] = 0.0
        queries = np.array(batch.query_slots)
        sequences = np.arange(len(queries)).repeat(queries)
        # Of each row its own slot in its sequence.
        slots = (batch.context_slots.numpy() - queries.cumsum())[sequences] + np.arange(len(sequences))
        firsts = batch.score_from.numpy()[sequences]
        numbers = (slots - NEAREST + 1 - firsts).clip(min=0)
        if width := int(numbers.max()):
            paid = torch.zeros(kv_heads, len(sequences), width)  # rows leave what lies beyond their number
            self.recording = Recording(paid, sequences, firsts, numbers, batch.block_tables.numpy())
        return self.recording

    def record(self, layer: int, rows: Tensor, probs: Tensor) -> None:
        """probs: float32 [R, kv_heads, L], what the rows int64 [R] paid to their sequences' first L slots in a layer of
        `layers`, summed over the query heads of a KV head."""
        into = self.recording
        if into is None:
            return
        columns = torch.from_numpy(into.firsts)[rows, None] + torch.arange(into.paid.shape[2])
        found = probs.transpose(0, 1).gather(2, columns.clamp(max=probs.shape[2] - 1).expand(probs.shape[1], -1, -1))
        if layer == self.layers[0]:
            into.paid[:, rows] = found
        else:
            into.paid[:, rows] += found

    def confirm(self, rows: Sequence[int]) -> None:
        """The rows of the last step, ascending, whose tokens are in the text: what they paid counts now."""
        of, self.recording = self.recording, None
        if of is None:
            return
        index = np.array(rows)
        index = index[of.numbers[index] > 0]
        if not len(index):
            return
        numbers, firsts, sequences, size = of.numbers[index], of.firsts[index], of.sequences[index], self._block_size
        by_head = of.paid.numpy()
        paid = by_head[0, index]
        for head in by_head[1:]:
            paid += head[index]
        columns = np.arange(paid.shape[1])
        counts = columns < numbers[:, None]
        slots = firsts[:, None] + np.where(counts, columns, 0)
        places = of.block_tables[sequences[:, None], slots // size] * size + slots % size
        # Sequences share no slot that counts, and so not its block: the first rows of all may add at once, then the
        # second ones, which are those of drafts or of a replay.
        owners = of.block_tables[sequences, firsts // size]
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        ranks = np.arange(len(index)) - starts.repeat(np.diff(starts, append=len(index)))
        for rank in range(int(ranks.max()) + 1):
            now = counts & (ranks == rank)[:, None]
            self.values[places[now]] += paid[now]

    def best(self, slots: Sequence[int], number: int) -> list[int]:
        """Places in `slots`, ascending, of those with the highest scores; of equal ones the last."""
        order = self.values[slots].argsort(kind="stable")
        kept: list[int] = sorted(order[len(slots) - number :].tolist())
        return kept

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """All at once."""
        self.values[targets] = self.values[sources]
