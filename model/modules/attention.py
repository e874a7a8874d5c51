"""Paged attention in plain torch: for batches whose contexts the host knows, and in shapes that no number decides.

Both read keys and values through block tables and fold the query heads of a KV head into one axis (grouped-query
attention), so that the cache is never expanded to the number of query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.batch import ForwardBatch
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.settled_places import SettledPlaces


class PagedAttention:
    """Attention of one ForwardBatch's slots over the cache; masks are made once a step, for all layers."""

    def __init__(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        dtype: torch.dtype,
        sliding_window: int | None = None,
        sliding_layers: Sequence[int] = (),
    ) -> None:
        """In sliding_layers a slot sees itself and the sliding_window - 1 slots before it (TrunkConfig)."""
        self.cache = cache
        self.sliding_layers = frozenset(sliding_layers)
        self.write_slots = batch.write_slots
        n = batch.num_single
        contexts = batch.context_slots_host
        if contexts is None:
            raise ValueError("a batch that only the device knows is for StaticAttention.")
        size = cache.block_size
        device = batch.positions.device
        # One-slot rows share a gather padded to the widest, so rows of like width go together, and one long context
        # does not cost the short ones: (rows, or None for all of them, what they see).
        self.singles: list[tuple[Tensor | None, Context]] = []
        self.num_single = n
        for members in _by_width([-(-slots // size) for slots in contexts[:n]]):
            width = -(-max(contexts[row] for row in members) // size)
            index = torch.tensor(members, device=device)
            columns = torch.arange(width * size, device=device)
            masks = Masks(columns - batch.context_slots[index, None] + 1, sliding_window, dtype, (1, 1))
            tables, of_rows = batch.block_tables[index, :width], batch.context_slots[index]
            of_members = Context(cache, tables, of_rows, masks, dtype)
            if (lent := lent_columns(batch, cache.settled, index, columns)) is not None:
                of_members.lend(lent, head_axis=1)
            self.singles.append((None if len(members) == n else index, of_members))
        # (first row, last row, what they see)
        self.chunks: list[tuple[int, int, Context]] = []
        start = n
        for i in range(n, len(batch.query_slots)):
            queries, context = batch.query_slots[i], contexts[i]
            width = -(-context // size)
            columns = torch.arange(width * size, device=device)
            rows = torch.arange(context - queries, context, device=device)
            masks = Masks(columns - rows[:, None], sliding_window, dtype)
            tables, of_rows = batch.block_tables[i : i + 1, :width], batch.context_slots[i : i + 1]
            of_chunk = Context(cache, tables, of_rows, masks, dtype)
            lent = lent_columns(batch, cache.settled, torch.tensor([i], device=device), columns)
            if lent is not None:
                of_chunk.lend(lent, head_axis=0)
            self.chunks.append((start, start + queries, of_chunk))
            start += queries

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, num_heads * head_dim].

        Writes k and v to the batch's slots first, so that slots of one chunk see each other.
        """
        self.cache.write(layer, self.write_slots, k, v)
        slides = layer in self.sliding_layers
        parts = []
        if self.num_single:
            parts.append(self._attend_singles(layer, slides, q[: self.num_single], k.shape[1]))
        parts += [_attend_chunk(q[first:last], *of.read(layer, slides)) for first, last, of in self.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_singles(self, layer: int, slides: bool, q: Tensor, kv_heads: int) -> Tensor:
        """q [n, num_heads, head_dim] of the one-slot rows -> [n, num_heads * head_dim]."""
        folded = q.unflatten(1, (kv_heads, -1))  # [n, kv_heads, query heads a kv head, head_dim]
        attended = torch.empty_like(folded)
        for rows, context in self.singles:
            keys, values, mask = context.read(layer, slides)
            out = F.scaled_dot_product_attention(
                folded if rows is None else folded.index_select(0, rows),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=mask,
            )
            attended = out if rows is None else attended.index_copy_(0, rows, out)
        return attended.reshape(len(q), -1)


class Masks:
    """The additive mask of ordinary layers and that of sliding ones, if there are any."""

    def __init__(self, distance: Tensor, window: int | None, dtype: torch.dtype, axes: tuple[int, ...] = ()) -> None:
        """distance: int64 [rows, columns], the column's slot minus the row's. axes: put between rows and columns."""
        distance = distance.view(len(distance), *axes, -1)
        self._full = _additive(distance > 0, dtype)
        self._sliding = self._full
        if window is not None and distance.shape[-1] > window:
            self._sliding = _additive((distance > 0) | (distance <= -window), dtype)

    def of(self, slides: bool) -> Tensor:
        return self._sliding if slides else self._full


class Context:
    """Block tables of some rows, and what the rows see of them."""

    def __init__(self, cache: PagedKVCache, tables: Tensor, contexts: Tensor, masks: Masks, dtype: torch.dtype) -> None:
        """tables: int64 [B, N]; contexts: int64 [B], how many of the slots there are its own.

        What lies behind those is of others or of earlier steps. Nobody reads it, even with a weight of 0, which times a
        number that overflowed is none: an own slot is read in its place, the last.
        """
        size, columns = cache.block_size, torch.arange(tables.shape[1] * cache.block_size, device=tables.device)
        places = torch.minimum(columns, contexts[:, None] - 1)
        self._slots = tables.gather(1, places // size) * size + places % size
        self._cache, self._masks, self._dtype = cache, masks, dtype
        self._of_heads: _HeadMasks | None = None
        self._head_axis = 0

    def lend(self, lent: Tensor, head_axis: int) -> None:
        """lent: bool [B, L], in which columns places are lent. head_axis: of masks, the axis of KV heads."""
        hidden, columns = float("-inf"), lent[:, None, None]
        mask = self._masks.of(slides=False).expand(*columns.shape[:2], *self._masks.of(slides=False).shape[-2:])
        nothing = torch.full_like(mask, hidden)
        without, of_lent = mask.masked_fill(columns, hidden), nothing.masked_fill(columns, 0)
        self._of_heads = _HeadMasks(mask, without, of_lent, nothing, lent)
        self._head_axis = head_axis

    def read(self, layer: int, slides: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [B, L, kv_heads, head_dim], and the additive mask, which may differ by KV head."""
        keys, values = self._cache.gather(layer, self._slots, self._dtype)
        if (masks := self._of_heads) is None or (settled := self._cache.settled) is None:
            return keys, values, self._masks.of(slides)
        lenders = settled.lenders[layer]
        parts = [(keys, values)]
        for number in range(lenders.shape[1]):
            parts.append(self._cache.gather_lent(layer, number, self._slots, masks.columns, self._dtype))
        keys, values = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        of_heads = [
            torch.cat(
                [masks.without if lends else masks.own, *(masks.lent if n >= 0 else masks.nothing for n in of)], -1
            )
            for lends, of in zip(settled.lends[layer].tolist(), lenders.tolist(), strict=True)
        ]
        return keys, values, torch.cat(of_heads, self._head_axis)


class _HeadMasks(NamedTuple):
    """Of a head's own places all that rows see, and without those that are lent; of another's these, and none.
    columns: bool [B, L], where places are lent."""

    own: Tensor
    without: Tensor
    lent: Tensor
    nothing: Tensor
    columns: Tensor


def lent_columns(batch: ForwardBatch, settled: SettledPlaces | None, rows: Tensor, columns: Tensor) -> Tensor | None:
    """bool [rows, columns]: in which columns of these sequences' tables places are lent; None where in none."""
    if settled is None or not settled.lent or batch.settled_from is None or batch.settled_slots is None:
        return None
    slots, number = columns - batch.settled_from[rows, None], batch.settled_slots[rows, None]
    return (slots >= 0) & (slots < number) & settled.are_lent(slots)


def _by_width(widths: list[int]) -> list[list[int]]:
    """Row indices grouped by width in blocks, to a factor of 2 (narrow ones all together)."""
    groups: dict[int, list[int]] = {}
    for row, width in enumerate(widths):
        groups.setdefault(max(width - 1, 3).bit_length(), []).append(row)
    return list(groups.values())


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [n, num_heads, head_dim], keys and values [1, L, num_kv_heads, head_dim], mask [n, L] -> [n, heads * hd]."""
    n, kv_heads = q.shape[0], keys.shape[2]
    per_kv = q.shape[1] // kv_heads
    # [kv_heads, per_kv, n, hd] and one KV head broadcast over its query heads: a stride of 0, no copy.
    queries = q.unflatten(1, (kv_heads, per_kv)).permute(1, 2, 0, 3)
    k = keys[0].transpose(0, 1).unsqueeze(1).expand(-1, per_kv, -1, -1)
    v = values[0].transpose(0, 1).unsqueeze(1).expand(-1, per_kv, -1, -1)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(n, -1)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf where `hidden`: the additive mask of scaled_dot_product_attention."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


class StaticAttention:
    """Gathers whole block tables, however much of them a row has, and masks what is beyond its context.

    So its cost is that of the longest context that the tables can hold: it is the reference for a kernel that reads
    context_slots itself. Called as PagedAttention; every row brings one slot and has a context of at least one.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        dtype: torch.dtype,
        sliding_window: int | None = None,
        sliding_layers: Sequence[int] = (),
    ) -> None:
        self._cache = cache
        self._sliding_layers = frozenset(sliding_layers)
        self._write_slots = batch.write_slots
        device, size = batch.positions.device, cache.block_size
        contexts, columns = batch.context_slots[:, None], batch.block_tables.shape[1]
        slots = torch.arange(columns * size, device=device)
        masks = Masks(slots - contexts + 1, sliding_window, dtype, (1, 1))
        self._context = Context(cache, batch.block_tables, batch.context_slots, masks, dtype)
        lent = lent_columns(batch, cache.settled, torch.arange(len(contexts), device=device), slots)
        if lent is not None:
            self._context.lend(lent, head_axis=1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, num_heads, head_dim], k and v [B, num_kv_heads, head_dim] -> [B, num_heads * head_dim]."""
        self._cache.write(layer, self._write_slots, k, v)
        keys, values, mask = self._context.read(layer, layer in self._sliding_layers)
        out = F.scaled_dot_product_attention(
            q.unflatten(1, (k.shape[1], -1)), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
        )
        return out.reshape(len(q), -1)
