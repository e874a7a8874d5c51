"""Paged attention in plain torch: for batches whose contexts the host knows, and in shapes that no number decides.

Both read keys and values through block tables and fold the query heads of a KV head into one axis (grouped-query
attention), so that the cache is never expanded to the number of query heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.batch import ForwardBatch
from hamburger.model.kv_cache import PagedKVCache


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
        self.cache, self._dtype = cache, dtype
        self.sliding_layers = frozenset(sliding_layers)
        self.write_slots = batch.write_slots
        n = batch.num_single
        contexts = batch.context_slots_host
        if contexts is None:
            raise ValueError("a batch that only the device knows is for StaticAttention.")
        size = cache.block_size
        device = batch.positions.device
        # One-slot rows share a gather padded to the widest, so rows of like width go together, and one long context
        # does not cost the short ones: (rows, or None for all of them, block tables, masks).
        self.singles: list[tuple[Tensor | None, Tensor, Masks]] = []
        self.num_single = n
        for members in _by_width([-(-slots // size) for slots in contexts[:n]]):
            width = -(-max(contexts[row] for row in members) // size)
            index = torch.tensor(members, device=device)
            columns = torch.arange(width * size, device=device)
            masks = Masks(columns - batch.context_slots[index, None] + 1, sliding_window, dtype, (1, 1))
            self.singles.append((None if len(members) == n else index, batch.block_tables[index, :width], masks))
        # (first row, last row, block table, masks)
        self.chunks: list[tuple[int, int, Tensor, Masks]] = []
        start = n
        for i in range(n, len(batch.query_slots)):
            queries, context = batch.query_slots[i], contexts[i]
            width = -(-context // size)
            columns = torch.arange(width * size, device=device)
            rows = torch.arange(context - queries, context, device=device)
            masks = Masks(columns - rows[:, None], sliding_window, dtype)
            self.chunks.append((start, start + queries, batch.block_tables[i : i + 1, :width], masks))
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
        for first, last, table, masks in self.chunks:
            keys, values = self.cache.gather(layer, table, self._dtype)
            parts.append(_attend_chunk(q[first:last], keys, values, masks.of(slides)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_singles(self, layer: int, slides: bool, q: Tensor, kv_heads: int) -> Tensor:
        """q [n, num_heads, head_dim] of the one-slot rows -> [n, num_heads * head_dim]."""
        folded = q.unflatten(1, (kv_heads, -1))  # [n, kv_heads, query heads a kv head, head_dim]
        attended = torch.empty_like(folded)
        for rows, tables, masks in self.singles:
            keys, values = self.cache.gather(layer, tables, self._dtype)
            out = F.scaled_dot_product_attention(
                folded if rows is None else folded.index_select(0, rows),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=masks.of(slides),
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
        self._cache, self._dtype = cache, dtype
        self._sliding_layers = frozenset(sliding_layers)
        self._write_slots = batch.write_slots
        device, size = batch.positions.device, cache.block_size
        contexts, columns = batch.context_slots[:, None], batch.block_tables.shape[1]
        # What a table holds beyond its context is of earlier steps: no row shall read another's keys, even for nothing.
        beyond = torch.arange(columns, device=device) * size >= contexts
        self._tables = batch.block_tables.masked_fill(beyond, cache.scratch_block)
        distance = torch.arange(columns * size, device=device) - contexts + 1
        self._masks = Masks(distance, sliding_window, dtype, (1, 1))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, num_heads, head_dim], k and v [B, num_kv_heads, head_dim] -> [B, num_heads * head_dim]."""
        self._cache.write(layer, self._write_slots, k, v)
        keys, values = self._cache.gather(layer, self._tables, self._dtype)
        out = F.scaled_dot_product_attention(
            q.unflatten(1, (k.shape[1], -1)),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self._masks.of(layer in self._sliding_layers),
        )
        return out.reshape(len(q), -1)
