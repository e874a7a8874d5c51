"""Weights in e4m3: the packing, and the product against the one spelt out."""

from __future__ import annotations

import pytest
import torch

from hamburger.model.float8 import Float8Linear, plain_product, scaled_product, to_float8
from quantised import norm_error, numbers
from small_models import CPU

CUDA = torch.device("cuda", 0)


def test_a_number_is_kept_to_one_part_in_sixteen_of_itself_or_of_the_smallest_step() -> None:
    x = numbers(24, 64)
    packed, scale = to_float8(x)
    assert packed.dtype == torch.float8_e4m3fn
    assert scale.shape == (24, 1)
    error = (packed.float() * scale - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, scale * 2**-10)).all())
    assert bool((packed.float().abs().amax(-1) == 448).all())  # the largest of each row uses the whole range


def test_zeros_stay_zeros_and_what_is_no_number_is_seen() -> None:
    x = torch.zeros(3, 32)
    x[1, 0], x[2, 5] = float("nan"), float("inf")
    packed, scale = to_float8(x)
    rows = packed.float() * scale
    assert bool((rows[0] == 0).all())
    assert bool(rows[1].isnan().all())
    assert bool(rows[2].isnan().any())


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_linear_computes_with_packed_weights_and_inputs(rows: int) -> None:
    x, weight = numbers(rows, 64, 1).bfloat16(), numbers(48, 64, 2)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = Float8Linear(weight, bias)(x.view(rows, 1, 64))
    assert y.shape == (rows, 1, 48)
    assert y.dtype == torch.bfloat16
    x8, weight8 = ((packed.double() * scale) for packed, scale in (to_float8(x), to_float8(weight)))
    assert norm_error(y.view(rows, 48), x8 @ weight8.t() + bias) < 5e-3  # bfloat16's rounding
    assert 5e-3 < norm_error(y.view(rows, 48), x.float() @ weight.t() + bias) < 6e-2  # e4m3's


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(1, 64, 48), (5, 96, 16), (33, 128, 256)])
def test_the_products_are_the_same(shape: tuple[int, int, int], device: torch.device) -> None:
    rows, inputs, outputs = shape
    x, weight = to_float8(numbers(rows, inputs, 4).to(device)), to_float8(numbers(outputs, inputs, 5).to(device))
    assert norm_error(scaled_product(*x, *weight), plain_product(*x, *weight)) < 4e-3


@pytest.mark.gpu
def test_on_a_gpu_the_linear_is_the_cpu_s() -> None:
    x, weight = numbers(17, 2048, 6).bfloat16(), numbers(512, 2048, 7).bfloat16()
    assert norm_error(Float8Linear(weight.cuda())(x.cuda()).cpu(), Float8Linear(weight)(x)) < 5e-3
