"""StaticBatch: a ForwardBatch of one-slot rows in tensors that stay where they are, padded to a bucket of rows.

Rows that only fill up the bucket are harmless: they have one slot, in the cache's scratch block, emit a token that
nobody reads, and go no further.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, SamplingBatch

MAX_END_IDS = 16
# The numbers of a row, one int64 or float32 each, with those of a row that fills up: what the trunk reads, and what the
# choices of tokens do.
_SLOT_INTS = {"group_sizes": 1, "positions": 0, "text_lengths": 1, "write_slots": 0, "context_slots": 1}
_SETTLED_INTS = {"settled_from": 0, "settled_slots": 0}  # which a batch may lack: no sequence has any then
_CHOICE_INTS = {"group_limits": 1, "top_k": 0, "seed": 0, "output_index": 0, "logprobs": -1}
_CHOICE_FLOATS = {"confidence": 1.0, "temperature": 0.0, "top_p": 1.0, "min_p": 0.0}
_TABLES = {"token_ids": 0, "block_tables": 0, "end_ids": -1}


class StaticBatch:
    """max_rows: of the largest bucket. max_columns: blocks of the longest sequence. max_group: tokens of a group.

    is_verified: each token of a group has a slot of its own, so a slot has one; else it has as many as a group.
    lends: places in settled slots are lent.
    """

    def __init__(
        self,
        max_rows: int,
        max_columns: int,
        max_group: int,
        scratch_slot: int,
        scratch_block: int,
        device: torch.device,
        *,
        has_text_lengths: bool,
        is_verified: bool,
        lends: bool = False,
    ) -> None:
        slots = _SLOT_INTS | {"write_slots": scratch_slot} | (_SETTLED_INTS if lends else {})
        if not has_text_lengths:
            del slots["text_lengths"]
        self._num_slot_ints = len(slots)
        ints, floats = slots | _CHOICE_INTS, _CHOICE_FLOATS
        self._names = [*ints], [*floats]
        self._padding = (
            torch.tensor([*ints.values()], dtype=torch.int64, device=device)[:, None],
            torch.tensor([*floats.values()], dtype=torch.float32, device=device)[:, None],
        )
        # A row a field, so that each field lies in one piece.
        self._numbers = tuple(padding.repeat(1, max_rows) for padding in self._padding)
        self._max_group, self._slot_tokens = max_group, 1 if is_verified else max_group
        widths = {"token_ids": self._slot_tokens, "block_tables": max_columns, "end_ids": MAX_END_IDS}
        self._fill = _TABLES | {"block_tables": scratch_block}
        self._tables = {
            name: torch.full((max_rows, width), self._fill[name], dtype=torch.int64, device=device)
            for name, width in widths.items()
        }
        self._emit = torch.arange(max_rows, device=device)

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether the whole batch has this form, and fits: one slot a row, a group for each, nothing scored, no LoRA
        adapters."""
        return (
            self.holds_choices(batch)
            and batch.num_single == len(batch.query_slots) == len(batch.emit)
            and batch.scored is None
            and not batch.loras
            and all(_of(batch, name).shape[1] <= self._tables[name].shape[1] for name in ("token_ids", "block_tables"))
        )

    def holds_choices(self, batch: ForwardBatch) -> bool:
        """Whether its emitting rows fit, whatever their slots are."""
        return 0 < len(batch.emit) <= len(self._emit) and batch.sampling.end_ids.shape[1] <= MAX_END_IDS

    def load(self, batch: ForwardBatch, bucket: int) -> None:
        """Take over a batch that it `holds`; the rows after it, up to the bucket, become harmless."""
        self._load(batch, bucket, 0, [*self._tables])

    def load_choices(self, batch: ForwardBatch, bucket: int) -> None:
        """The same of what is read after the trunk, of a batch whose choices it holds."""
        self._load(batch, bucket, self._num_slot_ints, ["end_ids"])

    def _load(self, batch: ForwardBatch, bucket: int, first_int: int, tables: list[str]) -> None:
        rows, firsts = len(batch.emit), (first_int, 0)
        for names, numbers, padding, first in zip(self._names, self._numbers, self._padding, firsts, strict=True):
            numbers[first:, :rows] = torch.stack([_of(batch, name) for name in names[first:]])
            numbers[first:, rows:bucket] = padding[first:]
        for name in tables:
            table, given = self._tables[name], _of(batch, name)
            table[:rows, : given.shape[1]] = given
            table[rows:bucket] = self._fill[name]
            if name != "block_tables":  # a table's further columns are beyond its context
                table[:rows, given.shape[1] :] = self._fill[name]

    def rows(self, bucket: int, *, any_sampled: bool, any_filtered: bool) -> ForwardBatch:
        """The first rows as a batch: views, with what `load` puts there."""
        given: dict[str, Any] = {}
        for names, numbers in zip(self._names, self._numbers, strict=True):
            given |= zip(names, numbers[:, :bucket].unbind(), strict=True)
        given |= {name: table[:bucket] for name, table in self._tables.items()}
        of_sampling = {field.name for field in fields(SamplingBatch)} & given.keys()
        sampling = SamplingBatch(
            **{name: given.pop(name) for name in of_sampling},
            any_sampled=any_sampled,
            any_filtered=any_filtered,
            max_logprobs=-1,
            adjustments=None,
        )
        return ForwardBatch(
            **given,
            max_group_size=self._slot_tokens,
            query_slots=[1] * bucket,
            context_slots_host=None,
            num_single=bucket,
            emit=self._emit[:bucket],
            max_group_limit=self._max_group,
            sampling=sampling,
        )


def _of(batch: ForwardBatch, name: str) -> Tensor:
    """A field of the batch or of its sampling."""
    value = getattr(batch if name in ForwardBatch.__dataclass_fields__ else batch.sampling, name)
    if value is None and name in _SETTLED_INTS:
        return torch.zeros_like(batch.context_slots)
    if not isinstance(value, Tensor):
        raise TypeError(f"the batch has no {name}.")
    return value


def with_extras(of_rows: SamplingBatch, batch: SamplingBatch) -> SamplingBatch:
    """The static rows' sampling with what is not static: the batch's penalties, and that it wants log-probabilities."""
    return replace(of_rows, adjustments=batch.adjustments, max_logprobs=batch.max_logprobs)
