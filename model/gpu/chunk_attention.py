"""Triton kernel of paged attention for chunks of prompts, in tiles: the rows of a chunk that share a context.

A program takes all query heads of a KV head, so that keys and values are read once. model/modules/attention.py is the
plain reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hamburger.model.config import TrunkConfig
from hamburger.model.device.transfer import upload
from hamburger.model.gpu.chunks import AttendChunks, Chunk, Settled
from hamburger.model.gpu.keys import (
    LOG2_E,
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

_CHUNK_ROWS = {2: 64, 4: 32}  # queries times query heads of a KV head; float32 is not multiplied by tensor cores
TILE_FIELDS = 4  # sequence, first row in T, queries, slot of the first query


@triton.jit(do_not_specialize=["table_width"], do_not_specialize_on_alignment=OF_ANY_ALIGNMENT)
def _chunks(
    q, data, scales, tables, tiles, out, settled_from, settled_slots, lenders, lends, offsets, table_width, scale,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, IS_INT8: tl.constexpr, FIELDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, KEPT: tl.constexpr, LENT: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tiles + tl.program_id(0) * FIELDS, tl.program_id(1)
    sequence, first_row = tl.load(tile), tl.load(tile + 1)
    queries, first_slot = tl.load(tile + 2).to(tl.int32), tl.load(tile + 3).to(tl.int32)
    m, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query_of = m // GROUP
    heads = (first_row + query_of) * (KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    inside = (query_of < queries)[:, None] & (columns < HEAD_DIM)[None, :]
    query = tl.load(q + heads[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    last_seen = first_slot + query_of
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_of_values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = first_slot * 0
    if WINDOW > 0:
        low = tl.maximum(first_slot - WINDOW + 1, 0)
    context = first_slot + queries
    first, own, lent, end = seen_of(context, settled_from, settled_slots, lenders, lends, sequence, kv_head, KEPT, LENT)
    for start in range(low, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        held = places < end
        slots, further = slots_of(places, held, context, first, own, lent, offsets, kv_head, KV_HEADS, KEPT, LENT)
        key = keys_of(tables, sequence, table_width, slots, held, kv_head, BLOCK_SIZE, KV_HEADS) + further
        at = key[:, None] * HEAD_DIM + columns[None, :]
        read = held[:, None] & (columns < HEAD_DIM)[None, :]
        keys = tl.load(data + at, mask=read, other=0)
        values = tl.load(data + at + KV_HEADS * HEAD_DIM, mask=read, other=0)
        scores = dot(query, tl.trans(as_query(keys, query))) * scale
        scores = scaled(scales, key, held, scores, IS_INT8)
        visible = slots[None, :] <= last_seen[:, None]
        if KEPT > 0:  # of slots long before the chunk
            visible = held[None, :] & (visible | (places >= own)[None, :])
        if WINDOW > 0:
            visible = visible & (slots[None, :] > last_seen[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet, its window beginning later, has no highest score.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        weights = scaled(scales, key + KV_HEADS, held, weights, IS_INT8)
        step = dot(weights.to(query.dtype), as_query(values, query))
        sum_of_values = sum_of_values * shrink[:, None] + step
        highest = higher
    result = sum_of_values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + heads[:, None] * HEAD_DIM + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


class TritonChunks:
    """ChunkAttention by the kernel of this file. dtype: of the queries."""

    def __init__(self, config: TrunkConfig, dtype: torch.dtype) -> None:
        self._per_kv, self._dtype = config.num_heads // config.num_kv_heads, dtype

    def plan(
        self, chunks: Sequence[Chunk], tables: Tensor, block_size: int, settled: Settled | None = None
    ) -> AttendChunks:
        """As ChunkAttention.plan."""
        tiles = upload(chunk_tiles(chunks, self._per_kv, self._dtype), tables.device)

        def attend(q: Tensor, layer: KVLayer, out: Tensor, window: int | None) -> None:
            attend_chunks(q, layer, tables, tiles, out, window, settled)

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
    q: Tensor,
    layer: KVLayer,
    tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    window: int | None = None,
    settled: Settled | None = None,
) -> None:
    """Causal attention of chunks over their sequences' slots so far, written to the chunks' rows of `out`.

    q and out: [T, num_heads, head_dim]. layer, tables [B, N], window and settled as for attend_singles. tiles: int64
    [tiles, 4], on the device, as chunk_tiles gives them.
    """
    tables = tables.contiguous()
    heads = q.shape[1]
    data, scales = layer.data, layer.scales
    block_size, _, kv_heads, head_dim = data.shape[1:]
    group = heads // kv_heads
    block_d = max(triton.next_power_of_2(head_dim), MIN_DOT)
    lending, lent = lending_of(layer, settled, tables)
    _chunks[(len(tiles), kv_heads)](
        q, data, data if scales is None else scales, tables, tiles, out, *lending, tables.shape[1],
        head_dim**-0.5 * LOG2_E,
        WINDOW=window or 0, BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        IS_INT8=scales is not None, FIELDS=TILE_FIELDS, BLOCK_M=_chunk_rows(group, q.dtype), BLOCK_D=block_d,
        BLOCK_N=slots_at_once(block_d, q), num_warps=4, num_stages=2, **lent,
    )  # fmt: skip


def _chunk_rows(group: int, dtype: torch.dtype) -> int:
    return max(_CHUNK_ROWS[dtype.itemsize], int(triton.next_power_of_2(group)))
