"""SlotScores: how much attention answer tokens got from later ones, by slot. Settling goes by it.

A step's rows are recorded first, [rows, slots], and count once it is known that they are no rejected drafts. A row adds
its part by itself, one row after the other, so that sums do not depend on how tokens share steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch

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
    sequences: Tensor
    firsts: Tensor
    numbers: Tensor
    block_tables: Tensor


class SlotScores:
    """One score a slot of the pool. layers: whose attention counts."""

    def __init__(self, num_slots: int, block_size: int, layers: Sequence[int], device: torch.device) -> None:
        self.layers = tuple(layers)
        self.recording: Recording | None = None
        self._values = torch.zeros(num_slots, device=device)
        self._block_size = block_size

    def begin(self, batch: ForwardBatch, kv_heads: int) -> Recording | None:
        """What this step is to record; None where no sequence of it settles. New slots begin at 0."""
        self.recording = None
        if batch.score_from is None:
            return None
        self._values.index_fill_(0, batch.write_slots, 0.0)
        queries = torch.tensor(batch.query_slots)
        sequences = torch.arange(len(queries)).repeat_interleave(queries)
        # Of each row its own slot in its sequence.
        slots = (batch.context_slots - queries.cumsum(0))[sequences] + torch.arange(len(sequences))
        firsts = batch.score_from[sequences]
        numbers = (slots - NEAREST + 1 - firsts).clamp_(min=0)
        width = int(numbers.max())
        if width:
            paid = torch.empty(kv_heads, len(sequences), width)
            self.recording = Recording(paid, sequences, firsts, numbers, batch.block_tables)
        return self.recording

    def record(self, layer: int, rows: Tensor, probs: Tensor) -> None:
        """probs: float32 [R, kv_heads, L], what the rows int64 [R] paid to their sequences' first L slots in a layer of
        `layers`, summed over the query heads of a KV head."""
        into = self.recording
        if into is None:
            return
        columns = into.firsts[rows, None] + torch.arange(into.paid.shape[2])
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
        index = torch.tensor(rows)
        index = index[of.numbers[index] > 0]
        if not len(index):
            return
        paid = of.paid[0, index]
        for head in range(1, of.paid.shape[0]):
            paid = paid + of.paid[head, index]
        columns = torch.arange(paid.shape[1])
        counts = columns < of.numbers[index, None]
        sequences = of.sequences[index]
        slots = of.firsts[index, None] + columns.where(counts, torch.tensor(0))
        size = self._block_size
        places = of.block_tables[sequences[:, None], slots // size] * size + slots % size
        # Sequences share no slot that counts, and so not its block: the first rows of all may add at once, then the
        # second ones, which are those of drafts or of a replay.
        owner = of.block_tables[sequences, of.firsts[index] // size]
        is_first = owner.diff(prepend=owner.new_full((1,), -1)) != 0
        starts = is_first.nonzero()[:, 0]
        ranks = torch.arange(len(index)) - starts[is_first.cumsum(0) - 1]
        for rank in range(int(ranks.max()) + 1):
            now = counts & (ranks == rank)[:, None]
            self._values.index_add_(0, places[now], paid[now])

    def best(self, slots: Sequence[int], number: int) -> list[int]:
        """Places in `slots`, ascending, of those with the highest scores; of equal ones the last."""
        order = self._values[torch.tensor(slots, device=self._values.device)].argsort(stable=True)
        kept: list[int] = order[len(slots) - number :].sort().values.tolist()
        return kept

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """int64 [N] each."""
        self._values[targets] = self._values[sources]
