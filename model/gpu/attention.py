"""Triton kernels of paged attention for one-slot rows, split over what they see.

A program takes all query heads of a KV head, so that keys and values are read once. What a launch looks like depends
on shapes alone, never on a step's numbers, and nothing waits for the device: decoding steps can be captured in a CUDA
graph. model/modules/attention.py is the plain reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hamburger.model.gpu.chunks import Settled
from hamburger.model.gpu.keys import (
    LOG2_E,
    MAX_SLOTS,
    MIN_DOT,
    OF_ANY_ALIGNMENT,
    as_query,
    dot,
    keys_of,
    lending_of,
    scaled,
    seen_of,
    slots_at_once,
    slots_of,
)
from hamburger.model.kv_cache import KVLayer

MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _split(seen, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First place that a one-slot row sees, and places of each split, a multiple of BLOCK_N."""
    low = seen * 0
    if WINDOW > 0:
        low = tl.maximum(seen - WINDOW, 0)
    return low, tl.cdiv(tl.cdiv(seen - low, splits), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["table_width", "splits"], do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _decode(
    q, data, scales, tables, contexts, out, partial, sums, settled_from, settled_slots, lenders, lends, offsets,
    table_width, splits, scale,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, IS_INT8: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, KEPT: tl.constexpr, LENT: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row).to(tl.int32)
    settled, own, lent, end = seen_of(context, settled_from, settled_slots, lenders, lends, row, kv_head, KEPT, LENT)
    low, size = _split(end, splits, WINDOW, BLOCK_N)
    first = low + split * size
    last = tl.minimum(first + size, end)
    if (first < last) | (not IS_SPLIT):
        group, columns = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        heads = row.to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + group
        inside = (group < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
        query = tl.load(q + heads[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        sum_of_values = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for start in range(first, last, BLOCK_N):
            places = start + tl.arange(0, BLOCK_N)
            seen = places < last
            slots, further = slots_of(places, seen, context, settled, own, lent, offsets, kv_head, KV_HEADS, KEPT, LENT)
            key = keys_of(tables, row, table_width, slots, seen, kv_head, BLOCK_SIZE, KV_HEADS) + further
            at = key[:, None] * HEAD_DIM + columns[None, :]
            # Slots out of sight may hold anything, and NaN times 0 is NaN.
            read = seen[:, None] & (columns < HEAD_DIM)[None, :]
            keys = tl.load(data + at, mask=read, other=0)
            values = tl.load(data + at + KV_HEADS * HEAD_DIM, mask=read, other=0)
            if GROUP == 1:
                scores = tl.sum(keys.to(tl.float32) * query.to(tl.float32), 1)[None, :]
            else:
                scores = dot(query, tl.trans(as_query(keys, query)))
            scores = scaled(scales, key, seen, scores * scale, IS_INT8)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(weights, 1)
            weights = scaled(scales, key + KV_HEADS, seen, weights, IS_INT8)
            if GROUP == 1:
                step = tl.sum(tl.trans(weights) * values.to(tl.float32), 0)[None, :]
            else:
                step = dot(weights.to(query.dtype), as_query(values, query))
            sum_of_values = sum_of_values * shrink[:, None] + step
            highest = higher
        result = sum_of_values / tl.where(total > 0, total, 1.0)[:, None]  # 0 for a row without context
        if IS_SPLIT:
            places = heads * splits + split
            tl.store(partial + places[:, None] * HEAD_DIM + columns[None, :], result, mask=inside)
            tl.store(sums + places, highest + tl.log2(total), mask=group < GROUP)
        else:
            tl.store(out + heads[:, None] * HEAD_DIM + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _merge(
    contexts, partial, sums, out, settled_from, settled_slots, lenders, lends, splits,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, MOST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, KEPT: tl.constexpr, LENT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(contexts + row).to(tl.int32)
    _, _, _, end = seen_of(context, settled_from, settled_slots, lenders, lends, row, head // GROUP, KEPT, LENT)
    low, size = _split(end, splits, WINDOW, BLOCK_N)
    used = tl.cdiv(end - low, tl.maximum(size, 1))  # later splits were not written
    split, columns = tl.arange(0, MOST), tl.arange(0, BLOCK_D)
    at = (row.to(tl.int64) * HEADS + head) * splits + split
    logs = tl.load(sums + at, mask=split < used, other=float("-inf"))
    weights = tl.exp2(logs - tl.where(used > 0, tl.max(logs, 0), 0.0))
    inside = (split < used)[:, None] & (columns < HEAD_DIM)[None, :]
    parts = tl.load(partial + at[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    to = out + (row.to(tl.int64) * HEADS + head) * HEAD_DIM + columns
    tl.store(to, result.to(out.dtype.element_ty), mask=columns < HEAD_DIM)


def num_splits(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """Parts that the contexts of `rows` one-slot rows are split into: a power of 2, from shapes alone.

    longest: the most slots that a block table of the launch addresses. processors: multiprocessors of the device.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * processors // max(rows * kv_heads, 1)
    most = min(wanted, triton.cdiv(longest, MAX_SLOTS), MAX_SPLITS)
    return 1 << max(int(most).bit_length() - 1, 0)


def attend_singles(
    q: Tensor,
    layer: KVLayer,
    tables: Tensor,
    contexts: Tensor,
    out: Tensor,
    splits: int,
    window: int | None = None,
    settled: Settled | None = None,
) -> None:
    """Attention of n rows with one slot each, the last of their contexts, written to the first n rows of `out`.

    q and out: [at least n, num_heads, head_dim]. layer: of PagedKVCache, the new slots already in it. tables:
    int64 [at least n, N]. contexts: int64 [n], the slots that each row sees; 0 is padding, whose output is 0. splits:
    as num_splits says. window: slots that a row sees at most; with settled slots there is none. settled: where rows
    have settled slots, [at least n]; None where none has any.
    """
    tables = tables.contiguous()  # of an expanded one only the first row would lie there
    n, heads = len(contexts), q.shape[1]
    data, scales = layer.data, layer.scales
    block_size, _, kv_heads, head_dim = data.shape[1:]
    group = heads // kv_heads
    block_d = max(triton.next_power_of_2(head_dim), MIN_DOT)
    block_n = slots_at_once(block_d, q)
    shape = {"WINDOW": window or 0, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": block_n}
    split_out, sums = out, out
    if splits > 1:
        split_out = torch.empty(n, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(n, heads, splits, dtype=torch.float32, device=q.device)
    lending, lent = lending_of(layer, settled, contexts)
    _decode[(n, kv_heads, splits)](
        q, data, data if scales is None else scales, tables, contexts, out, split_out, sums, *lending,
        tables.shape[1], splits, head_dim**-0.5 * LOG2_E,
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, IS_INT8=scales is not None, IS_SPLIT=splits > 1,
        BLOCK_G=1 if group == 1 else max(triton.next_power_of_2(group), MIN_DOT),
        num_warps=4, num_stages=3, **shape, **lent,
    )  # fmt: skip
    if splits > 1:
        _merge[(n, heads)](
            contexts, split_out, sums, out, *lending[:4], splits,
            HEADS=heads, GROUP=group, MOST=MAX_SPLITS, num_warps=4, **shape, **lent,
        )  # fmt: skip
