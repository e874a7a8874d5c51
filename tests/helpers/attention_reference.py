"""Attention spelled out slot by slot: what paged attention of every backend is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.settled_places import SettledPlaces


def reference_attention(
    q: Tensor,
    cache: PagedKVCache,
    layer: int,
    block_table: Sequence[int],
    context_slots: int,
    window: int | None = None,
    settled: tuple[int, int] = (0, 0),
) -> Tensor:
    """Attention of one sequence's last n slots, spelled out slot by slot in float32.

    q [n, num_heads, head_dim], the sequence's KV already in the cache -> [n, num_heads * head_dim], float32.
    settled: its first settled slot, and how many there are.
    """
    size, kv_heads = cache.block_size, cache.data[0].shape[3]
    at = [block_table[i // size] * size + i % size for i in range(context_slots)]
    queries = q.float().unflatten(1, (kv_heads, -1))
    rows = torch.arange(context_slots - len(q), context_slots, device=q.device)
    attended = []
    for head in range(kv_heads):
        own, borrowed = list(range(context_slots)), list[Tensor]()
        if (places := cache.settled) is not None:
            lent = lent_slots(places, *settled)
            if places.lends[layer, head]:
                own = [i for i in own if i not in lent]
            for lender in places.lenders[layer, head].tolist():
                if lender >= 0:
                    of, there = divmod(lender, kv_heads)
                    borrowed.append(_vectors(cache, of, there, [at[i] for i in lent]))
        keys, values = torch.cat([_vectors(cache, layer, head, [at[i] for i in own]), *borrowed]).unbind(1)
        distance = torch.tensor(own, device=q.device) - rows[:, None]
        hidden = (distance > 0) | (distance <= -(context_slots if window is None else window))
        hidden = torch.cat((hidden, hidden.new_zeros(len(q), len(keys) - len(own))), dim=1)
        scores = torch.einsum("ngd,ld->gnl", queries[:, head], keys) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        attended.append(torch.einsum("gnl,ld->ngd", weights, values))
    return torch.stack(attended, dim=1).flatten(1)


def lent_slots(places: SettledPlaces, first: int, number: int) -> list[int]:
    """Of a sequence's slots those in which places are lent."""
    return [i for i in range(first, first + number) if (i - first) % places.kept >= places.kept - places.lent]


def _vectors(cache: PagedKVCache, layer: int, head: int, at: Sequence[int]) -> Tensor:
    """float32 [len(at), 2, head_dim], keys and values of a KV head at these slots of the cache."""
    of_layer, slots = cache.layer(layer), torch.tensor(at, dtype=torch.int64, device=cache.data[0].device)
    both = of_layer.data.flatten(0, 1)[slots, :, head].float()
    if of_layer.scales is not None:
        both *= of_layer.scales.flatten(0, 1)[slots, :, head][..., None]
    return both
