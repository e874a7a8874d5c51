"""Each Triton kernel against plain torch, in its interpreter or on a GPU: outputs are poisoned beforehand, and so is
every slot that must not be read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from hamburger.model.attention import reference_attention
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rotary import RotaryEmbedding, rotate
from hamburger.model.triton_attention import (
    MAX_SPLITS,
    attend_chunks,
    attend_singles,
    chunk_tiles,
    num_splits,
)
from hamburger.model.triton_layers import add_rms_norm, gated, rotate_into_cache
from hamburger.model.triton_micro import micro_attention
from poisoned_caches import NAN, check, poisoned_cache
from small_models import trunk_config

# (query heads, KV heads, head_dim, window, dtype): odd groups, one query head, widths that are no power of 2.
HEADS = [
    (4, 2, 16, None, torch.float32),
    (3, 3, 80, 70, torch.float32),
    (6, 2, 96, None, torch.bfloat16),
    (7, 1, 64, 5, torch.float16),
    (2, 2, 128, None, torch.bfloat16),
]
KERNELS = {
    *("decode", "merge", "chunks", "rotary", "add_rms_norm", "gated", "micro", "micro_step"),
    *("multiply", "add_parts", "to_float8"),
}


def norms_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    q_weight, k_weight = torch.randn(2, head_dim, device=device).to(dtype)
    return q_weight, k_weight


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "dtype"), HEADS)
def test_one_slot_rows(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    splits: int,
    kernel_device: torch.device,
) -> None:
    torch.manual_seed(heads)
    totals = [1, 0, 150, 64]  # one is padding; each ends elsewhere in a step of the loop and in a block
    cache, blocks, table = poisoned_cache(totals, kv_heads, head_dim, dtype, kernel_device, block=16)
    q = torch.randn(len(totals) + 2, heads, head_dim, device=kernel_device).to(dtype)
    out = torch.full_like(q, NAN)
    attend_singles(q, cache.data[0], table, torch.tensor(totals, device=kernel_device), out, splits, window)
    assert out[len(totals) :].isnan().all()  # rows of others
    for row, (total, own) in enumerate(zip(totals, blocks, strict=True)):
        if total:
            exact = reference_attention(q[row : row + 1], cache, 0, own, total, window)
            check(out[row].flatten(), exact[0], dtype)
        else:
            assert (out[row] == 0).all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "dtype"), HEADS)
def test_chunks(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    torch.manual_seed(heads)
    lengths = [(40, 1), (0, 9), (71, 30)]  # (slots before, new slots); the first is not a chunk, and not attended
    totals = [before + new for before, new in lengths]
    cache, blocks, table = poisoned_cache(totals, kv_heads, head_dim, dtype, kernel_device, block=5)
    q = torch.randn(sum(new for _, new in lengths), heads, head_dim, device=kernel_device).to(dtype)
    tiles = chunk_tiles([(1, 1, 9, 0), (2, 10, 30, 71)], heads // kv_heads, dtype)
    assert len(tiles) > 2 or heads < 4
    out = torch.full_like(q, NAN)
    attend_chunks(q, cache.data[0], table, torch.tensor(tiles, device=kernel_device), out, window)
    assert out[0].isnan().all()
    start = 1
    for (_, new), total, own in list(zip(lengths, totals, blocks, strict=True))[1:]:
        exact = reference_attention(q[start : start + new], cache, 0, own, total, window)
        check(out[start : start + new].flatten(1), exact, dtype)
        start += new


def test_splits_follow_shapes_alone() -> None:
    assert num_splits(rows=1, kv_heads=8, longest=32768, processors=132) == MAX_SPLITS
    assert num_splits(rows=256, kv_heads=8, longest=32768, processors=132) == 1
    assert num_splits(rows=8, kv_heads=8, longest=32768, processors=132) == 8
    assert num_splits(rows=1, kv_heads=8, longest=100, processors=132) == 2
    assert num_splits(rows=0, kv_heads=8, longest=0, processors=132) == 1


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "dtype"), HEADS[:3])
def test_rotated_into_the_cache(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    normed: bool,
    kernel_device: torch.device,
) -> None:
    torch.manual_seed(heads)
    config = trunk_config(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    rotary = RotaryEmbedding(config, 64, kernel_device, dtype)
    cache = PagedKVCache(config, 3, 4, dtype, kernel_device)
    cache.data[0].fill_(NAN)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(5, width, device=kernel_device).to(dtype)
    positions = torch.tensor([0, 63, 5, 9, 10], device=kernel_device)
    # Row 1 has a slot but no context, row 2 no slot: both are padding. Rows 3 and 4 are a chunk of sequence 3.
    write = torch.tensor([7, 3, -1, 11, 0], device=kernel_device)
    contexts = torch.tensor([1, 0, 0, 11], device=kernel_device)
    weights = norms_of(head_dim, dtype, kernel_device) if normed else None
    q = rotate_into_cache(
        qkv, (rotary.cos, rotary.sin), positions, weights, 1e-5, cache.data[0], write, contexts, 3, heads
    )

    by_head = qkv.float().unflatten(1, (-1, head_dim))
    q_raw, k_raw, v = by_head.split((heads, kv_heads, kv_heads), dim=1)
    if weights is not None:
        q_raw, k_raw = (
            F.rms_norm(x, (head_dim,), w.float(), 1e-5) for x, w in zip((q_raw, k_raw), weights, strict=True)
        )
    cos, sin = (table.float() for table in rotary(positions))
    check(q, rotate(q_raw, cos, sin), dtype)
    flat, exact = cache.data[0].flatten(0, 1), torch.stack((rotate(k_raw, cos, sin), v), dim=1)
    written = [0, 3, 4]
    check(flat[write[written]], exact[written], dtype)
    untouched = [slot for slot in range(12) if slot not in (7, 11, 0)]
    assert flat[untouched].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 100])
def test_norm_after_addition(size: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    torch.manual_seed(size)
    x, delta = torch.randn(2, 3, 2, size, device=kernel_device).to(dtype)
    weight = torch.randn(size, device=kernel_device).to(dtype)
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    check(total, x.float() + delta.float(), dtype)
    check(normed, F.rms_norm(total.float(), (size,), weight.float(), 1e-5), dtype)
    per_feature = torch.randn(2, size, device=kernel_device).to(dtype)
    same, normed = add_rms_norm(x, None, per_feature, 1e-5)
    assert same is x
    check(normed, F.rms_norm(x.float(), (size,), eps=1e-5) * per_feature.float(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_product(dtype: torch.dtype, kernel_device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = 3 * torch.randn(2, 2 * 1500, device=kernel_device)
    gate_up = gate_up.to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    check(gated(gate_up), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "dtype"), [HEADS[0], HEADS[2]])
def test_micro_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    normed: bool,
    last_only: bool,
    kernel_device: torch.device,
) -> None:
    """Three rows of five places: 3 positions at once, then one of two rows that go on."""
    torch.manual_seed(heads)
    config = trunk_config(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    rotary = RotaryEmbedding(config, 64, kernel_device, dtype)
    tables, width = (rotary.cos, rotary.sin), (heads + 2 * kv_heads) * head_dim
    weights = norms_of(head_dim, dtype, kernel_device) if normed else None
    kv = torch.full((3, 5, 2, kv_heads, head_dim), NAN, device=kernel_device, dtype=dtype)
    first, later = torch.randn(3, 3, width), torch.randn(2, 1, width)
    first, later = first.to(kernel_device, dtype), later.to(kernel_device, dtype)
    places = torch.tensor([2, 0, 1], device=kernel_device)
    args: dict[str, Any] = {"tables": tables, "norms": weights, "eps": 1e-5, "kv": kv, "num_heads": heads}
    begun = micro_attention(first.flatten(0, 1), rows=places, length=0, new=3, last_only=last_only, **args)
    check(begun.unflatten(0, (3, -1)), exactly(first, rotary, weights, heads, kv_heads, 1 if last_only else 3), dtype)
    kept = torch.tensor([0, 2], device=kernel_device)
    on = micro_attention(later.flatten(0, 1), rows=places[kept], length=3, new=1, last_only=False, **args)
    whole = torch.cat((first[kept], later), dim=1)
    check(on.unflatten(0, (2, -1)), exactly(whole, rotary, weights, heads, kv_heads, 1), dtype)
    assert kv[:, 4].isnan().all()
    assert kv[0, 3].isnan().all()  # of the row that ended
    assert kv[:, :3].isfinite().all()


def exactly(
    qkv: Tensor,
    rotary: RotaryEmbedding,
    weights: tuple[Tensor, Tensor] | None,
    heads: int,
    kv_heads: int,
    last: int,
) -> Tensor:
    """Causal attention of the last positions of qkv [R, n, *] in float32 -> [R, last, heads * head_dim]."""
    n = qkv.shape[1]
    by_head = qkv.float().unflatten(2, (heads + 2 * kv_heads, -1))
    q, k, v = by_head.split((heads, kv_heads, kv_heads), dim=2)
    if weights is not None:
        q, k = (F.rms_norm(x, x.shape[-1:], w.float(), 1e-5) for x, w in zip((q, k), weights, strict=True))
    cos, sin = (table.float() for table in rotary(torch.arange(n, device=qkv.device)))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)[:, -last:]


@pytest.mark.timeout(900)  # seconds where nothing else runs
@pytest.mark.parametrize(
    ("capability", "dtype", "names"),
    [("90", "bfloat16", ""), ("86", "float32", "int8 for 512 rows|chunks 8/4")],  # the latter want most of the least
)
def test_they_compile_to_machine_code(capability: str, dtype: str, names: str, tmp_path: Path) -> None:
    """Within the GPU's shared memory, in a process where nothing is interpreted: Triton's compiler needs no GPU."""
    program = Path(__file__).parents[1] / "compile_kernels.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(program), capability, dtype, names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or done.stdout
    compiled = {line.split()[2].rstrip(":") for line in done.stdout.splitlines()}
    wanted = {"multiply", "chunks"} if names else KERNELS
    assert compiled == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_captured_launch_follows_its_tensors() -> None:
    """In a CUDA graph: tables and contexts change in place between replays, padding comes and goes."""
    torch.manual_seed(0)
    device, totals = torch.device("cuda"), [300, 17, 128]
    cache, blocks, table = poisoned_cache(totals, 2, 64, torch.bfloat16, device, block=16)
    q = torch.randn(3, 8, 64, device=device).bfloat16()
    out, contexts = torch.full_like(q, NAN), torch.tensor(totals, device=device)
    splits = num_splits(3, 2, table.shape[1] * 16, 132)
    attend_singles(q, cache.data[0], table, contexts, out, splits)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_singles(q, cache.data[0], table, contexts, out, splits)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        table.copy_(table.new_tensor([blocks[i] + [0] * (table.shape[1] - len(blocks[i])) for i in order]))
        contexts.copy_(contexts.new_tensor([0 if i == 1 else totals[i] for i in order]))
        out.fill_(NAN)
        graph.replay()
        for row, i in enumerate(order):
            if i == 1:
                assert (out[row] == 0).all()
            else:
                exact = reference_attention(q[row : row + 1], cache, 0, blocks[i], totals[i])
                check(out[row].flatten(), exact[0], torch.bfloat16)
