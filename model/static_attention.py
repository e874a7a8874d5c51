"""Paged attention of one-slot rows whose numbers only the device knows, so that a CUDA graph can capture it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.attention import Masks
from hamburger.model.batch import ForwardBatch
from hamburger.model.kv_cache import PagedKVCache


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
        # What a table holds beyond its context is of earlier steps: no row shall read another's keys, even for nothing.
        beyond = torch.arange(columns, device=device) * size >= contexts
        self._tables = batch.block_tables.masked_fill(beyond, cache.scratch_block)
        distance = torch.arange(columns * size, device=device) - contexts + 1
        self._masks = Masks(distance, sliding_window, dtype, (1, 1))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, num_heads, head_dim], k and v [B, num_kv_heads, head_dim] -> [B, num_heads * head_dim]."""
        self._cache.write(layer, self._write_slots, k, v)
        keys, values = self._cache.gather(layer, self._tables)
        out = F.scaled_dot_product_attention(
            q.unflatten(1, (k.shape[1], -1)),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self._masks.of(layer in self._sliding_layers),
        )
        return out.reshape(len(q), -1)
