"""Linears of the compiled kernels: exactly what their number format says, in 8 bits and in 4."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hamburger.model.cpu.library import InstructionSet, Kernels, load_kernels
from hamburger.model.cpu.weights import PackedWeight, has_4_bits
from hamburger.model.kernel_shapes import GROUP
from native_models import SETS, dequantized, half, rounded

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")


def on_grid(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs // GROUP, GROUP), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 15
    scales = torch.rand(outputs, inputs // GROUP, 1, generator=generator) / 50 + 0.01
    weight: Tensor = half(scales).mul(codes).sub(half(8 * scales)).flatten(1)
    return weight


@settings(max_examples=40)
@given(
    bits=st.sampled_from((4, 8)),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 4),
    rows=st.integers(1, 19),
    seed=st.integers(0, 1000),
    is_bf16=st.booleans(),
    instructions=st.sampled_from(SETS),
)
def test_a_linear_is_the_product_of_the_rounded(
    bits: int, outputs: int, groups: int, rows: int, seed: int, is_bf16: bool, instructions: InstructionSet
) -> None:
    kernels = load_kernels(instructions)
    if kernels is None:
        return
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, groups * GROUP, generator=generator) / 8
    weight = weight.bfloat16() if is_bf16 else weight
    bias = torch.randn(outputs, generator=generator) if seed % 2 else None
    x = torch.randn(rows, groups * GROUP, generator=generator)
    x[0, :GROUP] = 0
    y = PackedWeight(kernels, weight, bias, bits).multiply(x)
    exact = rounded(x).double() @ dequantized(weight, bits).double().T + (0 if bias is None else bias)
    assert y.shape == exact.shape
    # A code or an input that lies between two steps may fall to either side.
    off = (y - exact).abs()
    assert off.max() <= 0.3
    assert (off <= 1e-4).double().mean() >= 0.5


def test_weights_that_have_4_bits_are_kept_exactly(kernels: Kernels) -> None:
    weight = on_grid(40, 96)
    assert has_4_bits(weight)
    assert has_4_bits(weight.bfloat16())
    packed = PackedWeight(kernels, weight, None, 4)
    torch.testing.assert_close(packed.multiply(torch.eye(96)).T, weight, rtol=0, atol=1e-6)
    assert packed.nbytes == 3 * 3 * (16 * 32 // 2 + 64)  # blocks, groups, bytes


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    together=st.sampled_from((32, 64, 128)),
    least=st.integers(0, 12),
    most=st.integers(1, 15),
    is_bf16=st.booleans(),
    instructions=st.sampled_from(SETS),
)
def test_weights_made_of_4_bits_are_kept_whichever_codes_a_group_has(
    seed: int, together: int, least: int, most: int, is_bf16: bool, instructions: InstructionSet
) -> None:
    """As AWQ, GPTQ, GGUF's Q4_0 and Q4_K have them: groups of 32 use some of the 16 codes of their grid."""
    kernels = load_kernels(instructions)
    if kernels is None:
        return
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(min(least, most), max(least, most) + 1, (20, 128), generator=generator).float()
    steps = half(torch.rand(20, 128 // together, generator=generator) / 50 + 0.01).repeat_interleave(together, 1)
    exact = steps * (codes - 8)
    weight = exact.bfloat16() if is_bf16 else exact
    assert has_4_bits(weight)
    found = PackedWeight(kernels, weight, None, 4).multiply(torch.eye(128)).T
    # Half precision of scale and zero, and bfloat16's rounding, which no rounding to 4 bits may add to.
    assert ((found - exact) / steps).abs().max() < (0.08 if is_bf16 else 0.02)


@pytest.mark.parametrize("outlier", [0.0, 14.0, 18.0, 100.0])
def test_numbers_on_no_grid_are_no_further_off_than_on_15_even_steps(kernels: Kernels, outlier: float) -> None:
    """One that is far from 31 others puts all of them near the ends of one step, which is no grid of theirs."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) / 8
    if outlier:
        weight[:, ::GROUP] = outlier / 8
    found = PackedWeight(kernels, weight, None, 4).multiply(torch.eye(128)).T
    assert (found - weight).norm() <= 1.01 * (dequantized(weight, 4) - weight).norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_beside_any_others(bits: int, kernels: Kernels) -> None:
    packed, x = PackedWeight(kernels, torch.randn(37, 96), torch.randn(37), bits), torch.randn(19, 96)
    alone = torch.cat([packed.multiply(row[None]) for row in x])
    for first in range(3):
        for rows in range(1, 20 - first):
            assert torch.equal(packed.multiply(x[first : first + rows].contiguous()), alone[first : first + rows])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(kernels: Kernels, bits: int, fault: float) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = fault
    y = PackedWeight(kernels, torch.randn(5, 64), None, bits).multiply(x)
    assert y[[0, 2]].isfinite().all()
    assert y[1].isnan().all()


def test_only_an_even_grid_has_4_bits() -> None:
    assert not has_4_bits(torch.randn(100, 128))
    assert not has_4_bits(on_grid(100, 128)[:, :40])
    mixed = torch.cat((on_grid(100, 128), torch.randn(30, 128)))  # q and k of 4 bits, v of more
    assert not has_4_bits(mixed)
    uneven = torch.tensor([0.0, 0.02, 0.11, 1.0]).repeat(100, 32)  # few values, as of NF4
    assert not has_4_bits(uneven)
    assert has_4_bits(torch.full((16, 32), 0.5))
