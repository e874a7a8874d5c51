"""Triton kernels for what lies between a decoder layer's matrices: norms, the gated product, rotary embedding and the
new slots' keys and values. Each computes in float32 and rounds once; the plain ones are in model/modules/layers.py and
rotary.py.

Nothing here waits for the device or reads its numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hamburger.model.kv_cache import KVLayer

_GATE_COLUMNS = 1024
_ROTARY_HEADS = 16  # a program takes this many heads of a slot


@triton.jit
def _add_rms_norm(
    x, delta, weight, total, normed, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    value = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * SIZE + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    weights = tl.load(weight + (row % WEIGHTS) * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + columns, (value * scale * weights).to(normed.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and delta [..., D] -> x + delta, and its RMS norm times weight: [D], or [n, D] for x [..., n, D].

    Without delta the first result is x itself.
    """
    size = x.shape[-1]
    x = x.contiguous()
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(size)
        _add_rms_norm[(x.numel() // size,)](
            x, x if delta is None else delta.contiguous(), weight, total, normed, eps,
            SIZE=size, BLOCK=block, WEIGHTS=weight.numel() // size, ADDS=delta is not None,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return total, normed


@triton.jit
def _gated(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    open_by = gate
    if GELU:  # (1 + tanh x) / 2 is sigmoid(2 x); its exp would overflow far below
        open_by = tl.maximum(gate * (1.5957691216057308 + 0.07135481282636154 * gate * gate), -80.0)
    tl.store(out + row * SIZE + columns, (gate * tl.sigmoid(open_by) * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up of joined [..., 2 * FF] -> [..., FF]; activations as TrunkConfig has them."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    if out.numel():
        block = min(triton.next_power_of_2(size), _GATE_COLUMNS)
        _gated[(out.numel() // size, triton.cdiv(size, block))](
            gate_up, out, SIZE=size, BLOCK=block, GELU=activation == "gelu_tanh"
        )
    return out


@triton.jit
def scale_of_norm(a, b, eps, HEAD_DIM: tl.constexpr):
    """1 / rms of heads [n, *] in two halves -> [n, 1]."""
    return tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / HEAD_DIM + eps)


@triton.jit
def _nearest(x):
    """The nearest whole number, of two the even one, of x below 2^22: a float32 above 2^23 has no fraction."""
    return (x + 12582912.0) - 12582912.0


# at, write_slots and context_slots lie anywhere (attention.py).
@triton.jit(do_not_specialize=["singles"], do_not_specialize_on_alignment=["at", "write_slots", "context_slots"])
def _rotary(
    qkv, cos, sin, at, q_weight, k_weight, write_slots, context_slots, cache, scales, q_out, singles, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, NORMS: tl.constexpr, IS_INT8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # of q, then of k, then of v
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (column < half)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + column
    raw_a, raw_b = tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if NORMS:
        scale = scale_of_norm(a, b, eps, HEAD_DIM)
        for_q, for_k = inside & (head < HEADS), inside & (head >= HEADS) & (head < HEADS + KV_HEADS)
        # Each head has one of the two weights; the other's load gives 0.
        a *= scale * (
            tl.load(q_weight + column, mask=for_q, other=0.0).to(tl.float32)
            + tl.load(k_weight + column, mask=for_k, other=0.0).to(tl.float32)
        )
        b *= scale * (
            tl.load(q_weight + half + column, mask=for_q, other=0.0).to(tl.float32)
            + tl.load(k_weight + half + column, mask=for_k, other=0.0).to(tl.float32)
        )
    angles = tl.load(at + row) * HEAD_DIM + column
    cos_a = tl.load(cos + angles, mask=column < half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angles + half, mask=column < half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angles, mask=column < half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angles + half, mask=column < half, other=0.0).to(tl.float32)
    new_a, new_b = a * cos_a + b * sin_a, b * cos_b + a * sin_b

    is_q = inside & (head < HEADS)
    to_q = q_out + (row * HEADS + head) * HEAD_DIM + column
    tl.store(to_q, new_a.to(q_out.dtype.element_ty), mask=is_q)
    tl.store(to_q + half, new_b.to(q_out.dtype.element_ty), mask=is_q)

    slot = tl.load(write_slots + row)
    # A one-slot row without context is padding, which owns no slot.
    context = tl.load(context_slots + row, mask=row < singles, other=1)
    writes = (slot >= 0) & (context > 0)
    is_k = inside & (head >= HEADS) & (head < HEADS + KV_HEADS) & writes
    is_v = inside & (head >= HEADS + KV_HEADS) & writes
    # The slot's keys lie before its values, as they do in qkv.
    place = slot * 2 * KV_HEADS + head - HEADS
    to_kv = cache + place * HEAD_DIM + column
    if IS_INT8:  # as to_int8 of kv_cache.py
        is_key = head < HEADS + KV_HEADS
        x, y = tl.where(is_key, new_a, raw_a.to(tl.float32)), tl.where(is_key, new_b, raw_b.to(tl.float32))
        highest = tl.where(inside, tl.maximum(tl.abs(x), tl.abs(y)), 0.0)
        most = tl.max(highest, 1, keep_dims=True)
        inverse = tl.where(most > 0, 127.0 / tl.where(most > 0, most, 1.0), 0.0)
        writes_kv = is_k | is_v
        tl.store(to_kv, _nearest(x * inverse).to(tl.int8), mask=writes_kv)
        tl.store(to_kv + half, _nearest(y * inverse).to(tl.int8), mask=writes_kv)
        tl.store(scales + place, most / 127.0, mask=(head >= HEADS) & (head < HEADS + 2 * KV_HEADS) & writes)
    else:
        tl.store(to_kv, new_a.to(cache.dtype.element_ty), mask=is_k)
        tl.store(to_kv + half, new_b.to(cache.dtype.element_ty), mask=is_k)
        tl.store(to_kv, raw_a.to(cache.dtype.element_ty), mask=is_v)
        tl.store(to_kv + half, raw_b.to(cache.dtype.element_ty), mask=is_v)


def rotate_into_cache(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    at: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    layer: KVLayer,
    write_slots: Tensor,
    context_slots: Tensor,
    num_single: int,
    num_heads: int,
) -> Tensor:
    """q rotated, [T, num_heads, head_dim]; keys, rotated, and values go to their slots of `layer`.

    qkv: [T, (num_heads + 2 * kv_heads) * head_dim]. tables: cos and sin [positions, head_dim], of which slot t takes
    row at[t] (int64 [T]). norms: weights [head_dim] of the norms of q and k. layer: of PagedKVCache.
    write_slots: int64 [T], negative for none. context_slots: int64 [B]; of the first num_single sequences, which have
    one slot each, those with no context are padding and write nothing.
    """
    data, scales = layer.data, layer.scales
    kv_heads, head_dim = data.shape[-2:]
    q = qkv.new_empty(len(qkv), num_heads, head_dim)
    q_weight, k_weight = norms if norms is not None else (qkv, qkv)
    if len(qkv):
        heads = num_heads + 2 * kv_heads
        block = min(triton.next_power_of_2(heads), _ROTARY_HEADS)
        _rotary[(len(qkv), triton.cdiv(heads, block))](
            qkv.contiguous(), tables[0], tables[1], at, q_weight, k_weight, write_slots, context_slots, data,
            data if scales is None else scales, q, num_single, eps,
            HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
            BLOCK_HEADS=block, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), NORMS=norms is not None,
            IS_INT8=scales is not None, num_warps=2 if head_dim <= 64 else 4,
        )  # fmt: skip
    return q
