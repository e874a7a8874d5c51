"""Paged caches in which only what sequences own can be read unnoticed, and how attention over them is compared."""

from __future__ import annotations

import torch
from torch import Tensor

from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.settled_places import SettledPlaces
from small_models import trunk_config

NAN = float("nan")


def check(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """float32 digit by digit, half precision by relative norm; NaN never passes."""
    if dtype == torch.float32:
        torch.testing.assert_close(ours, exact.to(ours.dtype), atol=1e-5, rtol=1e-5)
    else:
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert error < {torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]


def poison_all(cache: PagedKVCache, poison: float = NAN) -> None:
    """Codes cannot be NaN, but their scales can."""
    for data in cache.data:
        data.fill_(127 if cache.scales else poison)
    for scales in cache.scales:
        scales.fill_(poison)


def poisoned_cache(
    totals: list[int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    block: int,
    poison: float = NAN,
    places: SettledPlaces | None = None,
) -> tuple[PagedKVCache, list[list[int]], Tensor]:
    """One layer, or those of `places`, whose blocks lie shuffled, poisoned where nobody has a slot; each one's blocks,
    and all as a table. dtype: of the cache."""
    needed = [-(-total // block) for total in totals]
    num_layers = 1 if places is None else len(places.lends)
    config = trunk_config(num_layers=num_layers, num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    cache = PagedKVCache(config, sum(needed) + 3, block, dtype, device, places)
    poison_all(cache, poison)
    order = (torch.randperm(sum(needed) + 2) + 1).tolist()  # block 0, which pads the table, stays poisoned
    blocks = [[order.pop() for _ in range(n)] for n in needed]
    for total, own in zip(totals, blocks, strict=True):
        slots = torch.tensor([own[i // block] * block + i % block for i in range(total)], dtype=torch.int64)
        for layer in range(num_layers):
            cache.write(layer, slots.to(device), *torch.randn(2, total, kv_heads, head_dim).to(device))
    width = max(needed) + 1
    table = torch.tensor([own + [0] * (width - len(own)) for own in blocks], device=device)
    return cache, blocks, table
