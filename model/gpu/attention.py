"""Triton kernels of paged attention: one-slot rows split over their context, and chunks of prompts in tiles.

A program takes all query heads of a KV head, so that keys and values are read once. What a launch looks like depends
on shapes alone, never on a step's numbers, and nothing waits for the device: decoding steps can be captured in a CUDA
graph. model/modules/attention.py is the plain reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hamburger.model.config import TrunkConfig
from hamburger.model.device.transfer import upload
from hamburger.model.gpu.chunks import AttendChunks, Chunk
from hamburger.model.kv_cache import KVLayer

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 4
_MIN_DOT = 16  # tl.dot's least width
_MAX_SLOTS = 64  # of a step of the loop over a context
_KEY_BYTES = 16384  # of such a step: several steps must fit into shared memory
_CHUNK_ROWS = {2: 64, 4: 32}  # queries times query heads of a KV head; float32 is not multiplied by tensor cores
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TILE_FIELDS = 4  # sequence, first row in T, queries, slot of the first query


@triton.jit
def dot(a, b):
    if _INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _split(context, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First slot that a one-slot row sees, and slots of each split, a multiple of BLOCK_N."""
    low = context * 0
    if WINDOW > 0:
        low = tl.maximum(context - WINDOW, 0)
    return low, tl.cdiv(tl.cdiv(context - low, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _keys_of(tables, row, table_width, slots, seen, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    """Which of a layer's keys and values [slots] the slots' keys are; their values are KV_HEADS further."""
    blocks = tl.load(tables + row.to(tl.int64) * table_width + slots // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return (blocks * BLOCK_SIZE + slots % BLOCK_SIZE) * (2 * KV_HEADS) + kv_head


@triton.jit
def _as(numbers, query):
    """By way of float32: the interpreter makes no bfloat16 of whole numbers."""
    return numbers.to(tl.float32).to(query.dtype)


@triton.jit
def _scale(scales, at, seen, numbers, IS_INT8: tl.constexpr):
    """Numbers [rows, slots], each slot's times its scale where the cache has scales."""
    if IS_INT8:
        numbers *= tl.load(scales + at, mask=seen, other=0.0)[None, :]
    return numbers


# Pointers into a step's staged numbers have any alignment: each would be compiled anew, while others wait.
@triton.jit(do_not_specialize=["table_width", "splits"], do_not_specialize_on_alignment=["tables", "contexts"])
def _decode(
    q, data, scales, tables, contexts, out, partial, sums, table_width, splits, scale,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, IS_INT8: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row).to(tl.int32)
    low, size = _split(context, splits, WINDOW, BLOCK_N)
    first = low + split * size
    last = tl.minimum(first + size, context)
    if (first < last) | (not IS_SPLIT):
        group, columns = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        heads = row.to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + group
        inside = (group < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
        query = tl.load(q + heads[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        sum_of_values = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for start in range(first, last, BLOCK_N):
            slots = start + tl.arange(0, BLOCK_N)
            seen = slots < last
            key = _keys_of(tables, row, table_width, slots, seen, kv_head, BLOCK_SIZE, KV_HEADS)
            at = key[:, None] * HEAD_DIM + columns[None, :]
            # Slots out of sight may hold anything, and NaN times 0 is NaN.
            read = seen[:, None] & (columns < HEAD_DIM)[None, :]
            keys = tl.load(data + at, mask=read, other=0)
            values = tl.load(data + at + KV_HEADS * HEAD_DIM, mask=read, other=0)
            if GROUP == 1:
                scores = tl.sum(keys.to(tl.float32) * query.to(tl.float32), 1)[None, :]
            else:
                scores = dot(query, tl.trans(_as(keys, query)))
            scores = _scale(scales, key, seen, scores * scale, IS_INT8)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(weights, 1)
            weights = _scale(scales, key + KV_HEADS, seen, weights, IS_INT8)
            if GROUP == 1:
                step = tl.sum(tl.trans(weights) * values.to(tl.float32), 0)[None, :]
            else:
                step = dot(weights.to(query.dtype), _as(values, query))
            sum_of_values = sum_of_values * shrink[:, None] + step
            highest = higher
        result = sum_of_values / tl.where(total > 0, total, 1.0)[:, None]  # 0 for a row without context
        if IS_SPLIT:
            places = heads * splits + split
            tl.store(partial + places[:, None] * HEAD_DIM + columns[None, :], result, mask=inside)
            tl.store(sums + places, highest + tl.log2(total), mask=group < GROUP)
        else:
            tl.store(out + heads[:, None] * HEAD_DIM + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["contexts"])
def _merge(
    contexts, partial, sums, out, splits,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MOST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(contexts + row).to(tl.int32)
    low, size = _split(context, splits, WINDOW, BLOCK_N)
    used = tl.cdiv(context - low, tl.maximum(size, 1))  # later splits were not written
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


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=["tables"])
def _chunks(
    q, data, scales, tables, tiles, out, table_width, scale,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, IS_INT8: tl.constexpr, FIELDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tiles + tl.program_id(0) * FIELDS, tl.program_id(1)
    sequence, first_row = tl.load(tile), tl.load(tile + 1)
    queries, first_slot = tl.load(tile + 2).to(tl.int32), tl.load(tile + 3).to(tl.int32)
    m, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query_of = m // GROUP
    heads = (first_row + query_of) * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    inside = (query_of < queries)[:, None] & (columns < HEAD_DIM)[None, :]
    query = tl.load(q + heads[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    own = first_slot + query_of
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_of_values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = first_slot * 0
    if WINDOW > 0:
        low = tl.maximum(first_slot - WINDOW + 1, 0)
    end = first_slot + queries
    for start in range(low, end, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        held = slots < end
        key = _keys_of(tables, sequence, table_width, slots, held, kv_head, BLOCK_SIZE, KV_HEADS)
        at = key[:, None] * HEAD_DIM + columns[None, :]
        read = held[:, None] & (columns < HEAD_DIM)[None, :]
        keys = tl.load(data + at, mask=read, other=0)
        values = tl.load(data + at + KV_HEADS * HEAD_DIM, mask=read, other=0)
        scores = dot(query, tl.trans(_as(keys, query))) * scale
        scores = _scale(scales, key, held, scores, IS_INT8)
        visible = slots[None, :] <= own[:, None]
        if WINDOW > 0:
            visible = visible & (slots[None, :] > own[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet, its window beginning later, has no highest score.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        weights = _scale(scales, key + KV_HEADS, held, weights, IS_INT8)
        step = dot(weights.to(query.dtype), _as(values, query))
        sum_of_values = sum_of_values * shrink[:, None] + step
        highest = higher
    result = sum_of_values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + heads[:, None] * HEAD_DIM + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


def num_splits(rows: int, kv_heads: int, longest: int, processors: int) -> int:
    """Parts that the contexts of `rows` one-slot rows are split into: a power of 2, from shapes alone.

    longest: the most slots that a block table of the launch addresses. processors: multiprocessors of the device.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * processors // max(rows * kv_heads, 1)
    most = min(wanted, triton.cdiv(longest, _MAX_SLOTS), MAX_SPLITS)
    return 1 << max(int(most).bit_length() - 1, 0)


def attend_singles(
    q: Tensor, layer: KVLayer, tables: Tensor, contexts: Tensor, out: Tensor, splits: int, window: int | None = None
) -> None:
    """Attention of n rows with one slot each, the last of their contexts, written to the first n rows of `out`.

    q and out: [at least n, num_heads, head_dim]. layer: of PagedKVCache, the new slots already in it. tables:
    int64 [at least n, N]. contexts: int64 [n], the slots that each row sees; 0 is padding, whose output is 0. splits:
    as num_splits says. window: slots that a row sees at most.
    """
    tables = tables.contiguous()  # of an expanded one only the first row would lie there
    n, heads = len(contexts), q.shape[1]
    data, scales = layer
    block_size, _, kv_heads, head_dim = data.shape[1:]
    group = heads // kv_heads
    block_d = max(triton.next_power_of_2(head_dim), _MIN_DOT)
    block_n = _slots_at_once(block_d, q)
    shape = {"WINDOW": window or 0, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": block_n}
    split_out, sums = out, out
    if splits > 1:
        split_out = torch.empty(n, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(n, heads, splits, dtype=torch.float32, device=q.device)
    _decode[(n, kv_heads, splits)](
        q, data, data if scales is None else scales, tables, contexts, out, split_out, sums,
        tables.shape[1], splits, head_dim**-0.5 * LOG2_E,
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, IS_INT8=scales is not None, IS_SPLIT=splits > 1,
        BLOCK_G=1 if group == 1 else max(triton.next_power_of_2(group), _MIN_DOT),
        num_warps=4, num_stages=3, **shape,
    )  # fmt: skip
    if splits > 1:
        _merge[(n, heads)](contexts, split_out, sums, out, splits, HEADS=heads, MOST=MAX_SPLITS, num_warps=4, **shape)


class TritonChunks:
    """ChunkAttention by the kernel of this file. dtype: of the queries."""

    def __init__(self, config: TrunkConfig, dtype: torch.dtype) -> None:
        self._per_kv, self._dtype = config.num_heads // config.num_kv_heads, dtype

    def plan(self, chunks: Sequence[Chunk], tables: Tensor, block_size: int) -> AttendChunks:
        """As ChunkAttention.plan."""
        tiles = upload(chunk_tiles(chunks, self._per_kv, self._dtype), tables.device)

        def attend(q: Tensor, layer: KVLayer, out: Tensor, window: int | None) -> None:
            attend_chunks(q, layer, tables, tiles, out, window)

        return attend


def chunk_tiles(chunks: Sequence[tuple[int, int, int, int]], per_kv: int, dtype: torch.dtype) -> list[list[int]]:
    """Tiles of chunks (as Chunk has them), the longest contexts first.

    per_kv: query heads of a KV head. dtype: of the queries.
    """
    each = _chunk_rows(per_kv, dtype) // per_kv
    tiles = [
        [sequence, row + done, min(each, queries - done), slot + done]
        for sequence, row, queries, slot in chunks
        for done in range(0, queries, each)
    ]
    return sorted(tiles, key=lambda tile: -tile[3])


def attend_chunks(
    q: Tensor, layer: KVLayer, tables: Tensor, tiles: Tensor, out: Tensor, window: int | None = None
) -> None:
    """Causal attention of chunks over their sequences' slots so far, written to the chunks' rows of `out`.

    q and out: [T, num_heads, head_dim]. layer and tables as for attend_singles, [B, N]. tiles: int64 [tiles, 4], on the
    device, as chunk_tiles gives them.
    """
    tables = tables.contiguous()
    heads = q.shape[1]
    data, scales = layer
    block_size, _, kv_heads, head_dim = data.shape[1:]
    group = heads // kv_heads
    block_d = max(triton.next_power_of_2(head_dim), _MIN_DOT)
    _chunks[(len(tiles), kv_heads)](
        q, data, data if scales is None else scales, tables, tiles, out, tables.shape[1], head_dim**-0.5 * LOG2_E,
        WINDOW=window or 0, BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        IS_INT8=scales is not None, FIELDS=TILE_FIELDS, BLOCK_M=_chunk_rows(group, q.dtype), BLOCK_D=block_d,
        BLOCK_N=_slots_at_once(block_d, q), num_warps=4, num_stages=2,
    )  # fmt: skip


def _chunk_rows(group: int, dtype: torch.dtype) -> int:
    return max(_CHUNK_ROWS[dtype.itemsize], int(triton.next_power_of_2(group)))


def _slots_at_once(block_d: int, q: Tensor) -> int:
    """A power of 2, as block_d is. Keys are multiplied as numbers of q's kind."""
    return max(min(_KEY_BYTES // (block_d * q.element_size()), _MAX_SLOTS), _MIN_DOT)
