"""Each Triton kernel against plain torch (kernel_checks.py), in its interpreter or on a GPU: fixed shapes, then random
ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the package triton is not installed")

from attention_reference import reference_attention
from hamburger.model.gpu.attention import MAX_SPLITS, attend_singles, num_splits
from hamburger.model.gpu.chunk_attention import chunk_tiles
from kernel_checks import (
    Heads,
    any_shapes,
    check_chunks,
    check_gated,
    check_micro,
    check_norm,
    check_rotated,
    check_singles,
)
from poisoned_caches import NAN, check, poisoned_cache

# Odd groups, one query head, widths that are no power of 2.
HEADS = [
    Heads(4, 2, 16, None, torch.float32),
    Heads(3, 3, 80, 70, torch.float32),
    Heads(6, 2, 96, None, torch.bfloat16),
    Heads(7, 1, 64, 5, torch.float16),
    Heads(2, 2, 128, None, torch.bfloat16),
    Heads(9, 3, 64, None, torch.float32, torch.int8),
    Heads(2, 2, 64, 70, torch.bfloat16, torch.int8),
]
KERNELS = {
    *("decode", "merge", "chunks", "rotary", "add_rms_norm", "gated", "micro"),
    *("multiply", "add_parts"),
}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("shape", HEADS)
def test_one_slot_rows(shape: Heads, splits: int, kernel_device: torch.device) -> None:
    """One is padding; each ends elsewhere in a step of the loop and in a block."""
    check_singles(shape, [1, 0, 150, 64], 16, splits, kernel_device)


@pytest.mark.parametrize("shape", HEADS)
def test_chunks(shape: Heads, kernel_device: torch.device) -> None:
    check_chunks(shape, [(40, 1), (0, 9), (71, 30)], 5, kernel_device)
    tiles = chunk_tiles([(1, 1, 9, 0), (2, 10, 30, 71)], shape.heads // shape.kv_heads, shape.dtype)
    assert len(tiles) > 2 or shape.heads < 4


# The first KV head lends in two of three layers, where the second borrows, of two heads or one (lending_cache).
LENDING = [
    Heads(4, 2, 16, None, torch.float32),
    Heads(3, 3, 40, None, torch.float32),
    Heads(6, 3, 64, None, torch.bfloat16),
    Heads(9, 3, 64, None, torch.float32, torch.int8),
    Heads(2, 2, 64, None, torch.bfloat16, torch.int8),
]


@pytest.mark.parametrize(("shape", "splits"), [*((shape, 4) for shape in LENDING), (LENDING[0], 1), (LENDING[4], 1)])
def test_one_slot_rows_see_places_that_are_lent(shape: Heads, splits: int, kernel_device: torch.device) -> None:
    """One is padding, and one has no settled slots."""
    settled = [(7, 60), (0, 0), (0, 0), (0, 85), (3, 5)]
    check_singles(shape, [150, 0, 70, 86, 9], 16, splits, kernel_device, settled)


@pytest.mark.parametrize("shape", LENDING)
def test_chunks_see_places_that_are_lent(shape: Heads, kernel_device: torch.device) -> None:
    check_chunks(shape, [(40, 1), (0, 9), (71, 30), (10, 3)], 5, kernel_device, [(2, 30), (0, 0), (4, 65), (0, 10)])


def test_splits_follow_shapes_alone() -> None:
    assert num_splits(rows=1, kv_heads=8, longest=32768, processors=132) == MAX_SPLITS
    assert num_splits(rows=256, kv_heads=8, longest=32768, processors=132) == 1
    assert num_splits(rows=8, kv_heads=8, longest=32768, processors=132) == 8
    assert num_splits(rows=1, kv_heads=8, longest=100, processors=132) == 2
    assert num_splits(rows=0, kv_heads=8, longest=0, processors=132) == 1


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [*HEADS[:3], *HEADS[5:]])
def test_rotated_into_the_cache(shape: Heads, normed: bool, kernel_device: torch.device) -> None:
    check_rotated(shape, 4, normed, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 100])
def test_norm_after_addition(size: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    check_norm(3, size, dtype, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_product(dtype: torch.dtype, kernel_device: torch.device) -> None:
    check_gated(2, 1500, dtype, kernel_device)


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [HEADS[0], HEADS[2]])
def test_micro_attention(shape: Heads, normed: bool, last_only: bool, kernel_device: torch.device) -> None:
    check_micro(shape, 3, 3, normed, last_only, kernel_device)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def heads(draw: st.DrawFn) -> Heads:
    kv_heads, window = draw(st.integers(1, 3)), draw(st.none() | st.integers(1, 150))
    head_dim = 2 * draw(st.integers(4, 66))
    kv_dtype = draw(st.sampled_from([None, torch.int8]))
    return Heads(kv_heads * draw(st.integers(1, 9)), kv_heads, head_dim, window, draw(DTYPES), kv_dtype)


@st.composite
def slots(draw: st.DrawFn, block: int, least: int = 0, most: int = 200) -> int:
    """Any number, or one beside a block's border."""
    border = block * draw(st.integers(0, most // block)) + draw(st.sampled_from([-1, 0, 1]))
    return draw(st.sampled_from([max(border, least), draw(st.integers(least, most))]))


@pytest.mark.slow
@any_shapes(12)
@given(heads(), st.integers(1, 40), st.sampled_from([1, 2, 8]), st.data())
def test_one_slot_rows_of_any_shape(
    kernel_device: torch.device, shape: Heads, block: int, splits: int, data: Any
) -> None:
    check_singles(shape, data.draw(st.lists(slots(block), min_size=1, max_size=4)), block, splits, kernel_device)


@pytest.mark.slow
@any_shapes(12)
@given(heads(), st.integers(1, 40), st.data())
def test_chunks_of_any_shape(kernel_device: torch.device, shape: Heads, block: int, data: Any) -> None:
    chunk = st.tuples(slots(block), slots(block, least=1, most=40))
    check_chunks(shape, [(3, 1), *data.draw(st.lists(chunk, min_size=1, max_size=2))], block, kernel_device)


@any_shapes(12)
@given(heads(), st.integers(2, 40), st.booleans())
def test_rotated_in_any_shape(kernel_device: torch.device, shape: Heads, block: int, normed: bool) -> None:
    check_rotated(shape, block, normed, kernel_device)


@any_shapes(12)
@given(st.integers(1, 9), st.integers(1, 3000), DTYPES)
def test_norms_and_gates_of_any_size(kernel_device: torch.device, rows: int, size: int, dtype: torch.dtype) -> None:
    check_norm(rows, size, dtype, kernel_device)
    check_gated(rows, size, dtype, kernel_device)


@pytest.mark.slow
@any_shapes(12)
@given(heads(), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.booleans())
def test_micro_attention_of_any_shape(
    kernel_device: torch.device, shape: Heads, rows: int, positions: int, normed: bool, last_only: bool
) -> None:
    check_micro(shape, rows, positions, normed, last_only, kernel_device)


@pytest.mark.compilers
@pytest.mark.timeout(900)  # seconds where nothing else runs
@pytest.mark.parametrize(
    ("capability", "dtype", "names"),
    [("90", "bfloat16", ""), ("86", "float32", "int8 for 512 rows|chunks 8/4")],  # the latter want most of the least
)
def test_they_compile_to_machine_code(capability: str, dtype: str, names: str, tmp_path: Path) -> None:
    """Within the GPU's shared memory, in a process where nothing is interpreted: Triton's compiler needs no GPU."""
    program = Path(__file__).parents[1] / "helpers" / "compile_kernels.py"
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
    attend_singles(q, cache.layer(0), table, contexts, out, splits)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_singles(q, cache.layer(0), table, contexts, out, splits)
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
