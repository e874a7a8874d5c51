"""Attention spelled out slot by slot: what paged attention of every backend is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hamburger.model.kv_cache import PagedKVCache


def reference_attention(
    q: Tensor,
    cache: PagedKVCache,
    layer: int,
    block_table: Sequence[int],
    context_slots: int,
    window: int | None = None,
) -> Tensor:
    """Attention of one sequence's last n slots, spelled out slot by slot in float32.

    q [n, num_heads, head_dim], the sequence's KV already in the cache -> [n, num_heads * head_dim], float32.
    """
    size = cache.block_size
    slots = [block_table[i // size] * size + i % size for i in range(context_slots)]
    of_layer = cache.layer(layer)
    both = of_layer.data.flatten(0, 1)[slots].float()
    if of_layer.scales is not None:
        both *= of_layer.scales.flatten(0, 1)[slots][..., None]
    per_kv = q.shape[1] // both.shape[2]
    keys, values = (both[:, i].repeat_interleave(per_kv, dim=1) for i in (0, 1))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), keys) / q.shape[-1] ** 0.5
    columns = torch.arange(context_slots, device=q.device)
    distance = columns[None, :] - columns[context_slots - q.shape[0] :, None]
    hidden = (distance > 0) | (distance <= -(context_slots if window is None else window))
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values).flatten(1)
