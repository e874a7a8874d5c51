"""Triton kernel of a micro layer's attention: norms and rotary embedding of q and k, the new positions into the cache,
and attention over its few positions, in one launch. modules/micro_decoder.py is the plain reference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hamburger.model.gpu.keys import LOG2_E
from hamburger.model.gpu.layers import scale_of_norm


@triton.jit
def _turned(a, b, weight, cos, sin, angles, inside, eps, HEAD_DIM: tl.constexpr, NORMS: tl.constexpr):
    """Heads in two halves, normed where NORMS, rotated by the tables' rows that begin at `angles`."""
    half: tl.constexpr = HEAD_DIM // 2
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORMS:
        scale = scale_of_norm(a, b, eps, HEAD_DIM)
        columns = tl.arange(0, a.shape[1])[None, :]
        a *= scale * tl.load(weight + columns, mask=columns < half, other=0.0).to(tl.float32)
        b *= scale * tl.load(weight + half + columns, mask=columns < half, other=0.0).to(tl.float32)
    cos_a = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angles + half, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angles + half, mask=inside, other=0.0).to(tl.float32)
    return a * cos_a + b * sin_a, b * cos_b + a * sin_b


@triton.jit(do_not_specialize=["length"])
def _micro(
    qkv, cos, sin, q_weight, k_weight, rows, kv, out, length, eps, scale,
    NEW: tl.constexpr, FIRST: tl.constexpr, POSITIONS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_HALF: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    row, kv_head, new = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    own = length + new
    half: tl.constexpr = HEAD_DIM // 2
    width: tl.constexpr = (GROUP + 2) * KV_HEADS * HEAD_DIM
    positions, columns = tl.arange(0, BLOCK_P)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    inside = columns < half
    is_old, is_new = inside & (positions < length), inside & (positions >= length) & (positions <= own)

    # Each program makes the new keys that it sees anew: nothing is awaited, and each position is written once.
    held = kv + ((tl.load(rows + row) * POSITIONS + positions) * (2 * KV_HEADS) + kv_head) * HEAD_DIM + columns
    fresh = qkv + (row * NEW + positions - length) * width + (GROUP * KV_HEADS + kv_head) * HEAD_DIM + columns
    a, b = _turned(
        tl.load(fresh, mask=is_new, other=0.0), tl.load(fresh + half, mask=is_new, other=0.0),
        k_weight, cos, sin, positions * HEAD_DIM + columns, is_new, eps, HEAD_DIM, NORMS,
    )  # fmt: skip
    a, b = a.to(kv.dtype.element_ty), b.to(kv.dtype.element_ty)
    values: tl.constexpr = KV_HEADS * HEAD_DIM
    v_a = tl.load(fresh + values, mask=is_new, other=0.0).to(kv.dtype.element_ty)
    v_b = tl.load(fresh + values + half, mask=is_new, other=0.0).to(kv.dtype.element_ty)
    is_own = inside & (positions == own)
    tl.store(held, a, mask=is_own)
    tl.store(held + half, b, mask=is_own)
    tl.store(held + values, v_a, mask=is_own)
    tl.store(held + values + half, v_b, mask=is_own)

    if new >= FIRST:
        # Each position is either held or new, and masked loads give 0 for the other.
        key_a = tl.where(is_new, a, tl.load(held, mask=is_old, other=0.0)).to(tl.float32)
        key_b = tl.where(is_new, b, tl.load(held + half, mask=is_old, other=0.0)).to(tl.float32)
        value_a = tl.where(is_new, v_a, tl.load(held + values, mask=is_old, other=0.0)).to(tl.float32)
        value_b = tl.where(is_new, v_b, tl.load(held + values + half, mask=is_old, other=0.0)).to(tl.float32)
        group = tl.arange(0, BLOCK_G)[:, None]
        asked = inside & (group < GROUP)
        source = qkv + (row * NEW + new) * width + (kv_head * GROUP + group) * HEAD_DIM + columns
        raw_a, raw_b = tl.load(source, mask=asked, other=0.0), tl.load(source + half, mask=asked, other=0.0)
        query_a, query_b = _turned(
            raw_a, raw_b, q_weight, cos, sin, own * HEAD_DIM + columns, inside, eps, HEAD_DIM, NORMS
        )
        query_a, query_b = query_a.to(raw_a.dtype).to(tl.float32), query_b.to(raw_b.dtype).to(tl.float32)
        products = query_a[:, None, :] * key_a[None, :, :] + query_b[:, None, :] * key_b[None, :, :]
        scores = tl.sum(products, 2) * scale
        scores = tl.where(tl.arange(0, BLOCK_P)[None, :] <= own, scores, float("-inf"))
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
        to = out + ((row * (NEW - FIRST) + new - FIRST) * KV_HEADS * GROUP + kv_head * GROUP + group) * HEAD_DIM
        to += columns
        attended_a = tl.sum(weights[:, :, None] * value_a[None, :, :], 1)
        attended_b = tl.sum(weights[:, :, None] * value_b[None, :, :], 1)
        tl.store(to, attended_a.to(out.dtype.element_ty), mask=asked)
        tl.store(to + half, attended_b.to(out.dtype.element_ty), mask=asked)


def micro_attention(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    kv: Tensor,
    rows: Tensor,
    length: int,
    new: int,
    num_heads: int,
    *,
    last_only: bool,
) -> Tensor:
    """Causal attention of each row's `new` positions after its `length` held ones -> [R * n, num_heads * head_dim].

    qkv: [R * new, (num_heads + 2 * kv_heads) * head_dim], of which row r's positions lie together. tables: cos and sin
    [positions, head_dim]. norms: weights [head_dim] of the norms of q and k. kv: [places, positions, 2, kv_heads,
    head_dim], in which row r has place rows[r] (int64 [R]) and its new keys and values are written. n is `new`, or 1
    with last_only: then only the last position attends.
    """
    positions, _, kv_heads, head_dim = kv.shape[1:]
    group, first = num_heads // kv_heads, new - 1 if last_only else 0
    out = qkv.new_empty(len(rows) * (new - first), num_heads * head_dim)
    q_weight, k_weight = norms if norms is not None else (qkv, qkv)
    blocks = [triton.next_power_of_2(size) for size in (group, positions, head_dim // 2)]
    if len(rows):
        _micro[(len(rows), kv_heads, new)](
            qkv.contiguous(), tables[0], tables[1], q_weight, k_weight, rows, kv, out, length, eps,
            head_dim**-0.5 * LOG2_E,
            NEW=new, FIRST=first, POSITIONS=positions, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
            BLOCK_G=blocks[0], BLOCK_P=blocks[1], BLOCK_HALF=blocks[2], NORMS=norms is not None,
            num_warps=min(max(blocks[0] * blocks[1] * blocks[2] // 1024, 1), 8),
        )  # fmt: skip
    return out
