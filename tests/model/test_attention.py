"""Paged attention against the slot-by-slot reference, over random batches and block tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_reference import reference_attention
from hamburger.model.batch import ForwardBatch, empty_sampling
from hamburger.model.kv_cache import PagedKVCache, from_int8, slot_bytes, to_int8
from hamburger.model.modules.attention import PagedAttention, StaticAttention
from poisoned_caches import poison_all
from small_models import CPU, trunk_config

BLOCK = 4


def parts_of(cache: PagedKVCache) -> list[Tensor]:
    """Of the first layer the data, and scales if there are any, by slot."""
    return [part[0].flatten(0, 1) for part in (cache.data, cache.scales) if part]


def batch_of(lengths: list[tuple[int, int]], seed: int) -> tuple[ForwardBatch, list[list[int]]]:
    """Sequences (context slots before, new slots) on shuffled blocks; those with one new slot come first."""
    lengths = sorted(lengths, key=lambda pair: pair[1] > 1)
    totals = [before + new for before, new in lengths]
    needed = [-(-total // BLOCK) for total in totals]
    order = torch.randperm(96, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    write, width = [], max(needed)
    for (before, new), table in zip(lengths, tables, strict=True):
        write += [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(before, before + new)]
    n = len(write)
    ones = torch.ones(n, dtype=torch.int64)
    batch = ForwardBatch(
        token_ids=ones[:, None],
        group_sizes=ones,
        max_group_size=1,
        positions=ones,
        write_slots=torch.tensor(write),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        context_slots=torch.tensor(totals),
        query_slots=[new for _, new in lengths],
        context_slots_host=totals,
        num_single=sum(new == 1 for _, new in lengths),
        emit=torch.empty(0, dtype=torch.int64),
        confidence=torch.empty(0),
        group_limits=torch.empty(0, dtype=torch.int64),
        max_group_limit=1,
        sampling=empty_sampling(0, CPU),
    )
    return batch, tables


@given(
    lengths=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 1, 2, 9])), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_equals_reference_and_touches_only_its_slots(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype, lengths: list[tuple[int, int]], seed: int
) -> None:
    config = trunk_config(num_heads=heads, num_kv_heads=kv_heads, num_layers=1)
    cache = PagedKVCache(config, 96, BLOCK, dtype, CPU)
    generator = torch.Generator().manual_seed(seed)
    batch, tables = batch_of(lengths, seed)
    # Foreign and stale slots hold what is left of a sequence that went wrong: reading one would show.
    assert batch.context_slots_host is not None
    poison_all(cache)
    for total, table in zip(batch.context_slots_host, tables, strict=True):
        slots = torch.tensor([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(total)])
        cache.write(0, slots, *torch.randn(2, total, kv_heads, 8, generator=generator))
    before = [part.clone() for part in parts_of(cache)]
    n = len(batch.write_slots)
    q = torch.randn(n, heads, 8, generator=generator)
    k, v = torch.randn(2, n, kv_heads, 8, generator=generator)
    out = PagedAttention(batch, cache, torch.float32, window, () if window is None else (0,))(0, q, k, v)

    written = torch.stack((k, v), dim=1)
    untouched = torch.ones(97 * BLOCK, dtype=torch.bool)
    untouched[batch.write_slots] = False
    wanted = to_int8(written) if dtype == torch.int8 else (written,)
    for part, was, new_slots in zip(parts_of(cache), before, wanted, strict=True):
        torch.testing.assert_close(part[batch.write_slots], new_slots, atol=0, rtol=0)
        torch.testing.assert_close(part[untouched], was[untouched], atol=0, rtol=0, equal_nan=True)
    start = 0
    for new, total, table in zip(batch.query_slots, batch.context_slots_host, tables, strict=True):
        expected = reference_attention(q[start : start + new], cache, 0, table, total, window)
        torch.testing.assert_close(out[start : start + new], expected, atol=1e-5, rtol=1e-5)
        start += new


@pytest.mark.parametrize("window", [None, 1, 6])
def test_static_attention_equals_the_reference_whatever_lies_beyond_the_contexts(window: int | None) -> None:
    config = trunk_config(num_layers=1)
    generator = torch.Generator().manual_seed(3)
    for seed in range(20):
        draw = torch.randint(0, 40, (7,), generator=generator).tolist()
        batch, tables = batch_of([(before, 1) for before in draw], seed)
        assert batch.context_slots_host is not None
        cache = PagedKVCache(config, 96, BLOCK, torch.float32, CPU)
        poison_all(cache)  # by a sequence that went wrong
        for total, table in zip(batch.context_slots_host, tables, strict=True):
            slots = torch.tensor([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(total)])
            cache.write(0, slots, *torch.randn(2, total, 2, 8, generator=generator))
        wide = torch.randint(0, 96, (7, 12), generator=generator)
        wide[:, : batch.block_tables.shape[1]] = batch.block_tables
        rows = torch.arange(batch.block_tables.shape[1]) * BLOCK < batch.context_slots[:, None]
        wide[:, : rows.shape[1]] = torch.where(rows, batch.block_tables, wide[:, : rows.shape[1]])
        q, k, v = (torch.randn(7, heads, 8, generator=generator) for heads in (4, 2, 2))
        static = StaticAttention(
            replace(batch, block_tables=wide), cache, torch.float32, window, () if window is None else (0,)
        )
        out = static(0, q, k, v)
        for row, (total, table) in enumerate(zip(batch.context_slots_host, tables, strict=True)):
            expected = reference_attention(q[row : row + 1], cache, 0, table, total, window)
            torch.testing.assert_close(out[row : row + 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_slot_bytes_is_what_the_cache_takes(dtype: torch.dtype) -> None:
    config = trunk_config()
    cache = PagedKVCache(config, 6, BLOCK, dtype, CPU)  # and a scratch block
    assert sum(part.nbytes for part in (*cache.data, *cache.scales)) == slot_bytes(config, dtype) * 7 * BLOCK


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_lie_one_after_the_other(device: str) -> None:
    cache = PagedKVCache(trunk_config(), 6, BLOCK, torch.int8, torch.device(device))
    for part in (cache.data, cache.scales):
        assert [layer.storage_offset() for layer in part] == [i * part[0].numel() for i in range(4)]


# Smaller ones have a scale that is no normal number, which processors may be set to take for zero.
ENTRIES = st.floats(-1e4, 1e4, width=32).map(lambda value: value if abs(value) > 1e-30 else 0.0)


@given(st.lists(st.lists(ENTRIES, min_size=8, max_size=8), min_size=1, max_size=5))
def test_codes_are_the_nearest_and_the_largest_has_the_last(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    codes, scales = to_int8(x)
    most = x.abs().amax(-1)
    assert (from_int8(codes, scales) - x).abs().le(scales[:, None] * 0.5001).all()
    assert codes.abs().amax(-1).tolist() == [127 if value > 0 else 0 for value in most.tolist()]
    assert torch.equal(to_int8(-x)[0], -codes)
