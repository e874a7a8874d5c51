"""Weights as 8-bit integers and in e4m3: the rounding, and the linear. test_triton_eight_bits.py has the kernels."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from hamburger.model.gpu.int8 import (
    FLOAT8,
    LARGEST,
    EightBitLinear,
    EightBits,
    plain_float8_product,
    plain_product,
    to_codes,
)
from quantised import norm_error, numbers

KINDS: tuple[EightBits, ...] = get_args(EightBits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_is_kept_to_half_a_step(kind: EightBits) -> None:
    weight = numbers(24, 70)
    codes, scales = to_codes(weight, kind)
    assert (codes.dtype, scales.dtype, scales.shape) == (dtype_of(kind), torch.float32, (24, 1))
    # A step of e4m3 is an eighth of the number, or the least it has.
    half = scales / 2 if kind == "int8" else torch.maximum(weight.abs() / 16, scales * 2**-10)
    assert bool(((codes.float() * scales - weight).abs() <= half * 1.0001).all())
    assert bool((codes.float().abs().amax(-1) == LARGEST[kind]).all())  # each row's largest uses the whole range


def dtype_of(kind: EightBits) -> torch.dtype:
    return torch.int8 if kind == "int8" else FLOAT8


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_what_is_no_number_is_seen(kind: EightBits) -> None:
    weight = torch.zeros(3, 32)
    weight[1, 0], weight[2, 5] = float("nan"), float("inf")
    codes, scales = to_codes(weight, kind)
    assert bool(codes.float().isfinite().all())  # the kernels know no other
    y = plain_product(torch.ones(1, 32), codes, scales, None)
    assert y[0, 0] == 0
    assert not bool(y[0, 1:].isfinite().any())


@pytest.mark.parametrize("kind", KINDS)
def test_half_the_bytes_of_bfloat16(kind: EightBits) -> None:
    linear = EightBitLinear(numbers(256, 512).bfloat16(), None, kind)
    assert sum(tensor.nbytes for tensor in linear.buffers()) == 256 * 512 + 256 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_linear_computes_with_rounded_weights_and_whole_inputs(kind: EightBits) -> None:
    x, weight = numbers(3, 64, 1).bfloat16(), numbers(48, 64, 2)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = EightBitLinear(weight, bias, kind)(x.view(3, 1, 64))
    assert (y.shape, y.dtype) == ((3, 1, 48), torch.bfloat16)
    codes, scales = to_codes(weight, kind)
    assert norm_error(y.view(3, 48), x.double() @ (codes.double() * scales).t() + bias) < 5e-3  # bfloat16's rounding
    least, most = {"int8": (1e-3, 2e-2), "fp8": (5e-3, 4e-2)}[kind]
    assert least < norm_error(y.view(3, 48), x.double() @ weight.double().t() + bias) < most


def test_many_rows_in_e4m3_round_the_inputs_too() -> None:
    x, (codes, scales) = numbers(40, 64, 4).bfloat16(), to_codes(numbers(48, 64, 5), "fp8")
    bias = torch.randn(48, generator=torch.Generator().manual_seed(6)).bfloat16()
    x_codes, x_scales = to_codes(x, "fp8")
    wanted = (x_codes.double() * x_scales) @ (codes.double() * scales).t() + bias.double()
    y = plain_float8_product(x, codes, scales, bias)
    assert y.dtype == torch.bfloat16
    assert norm_error(y, wanted) < 5e-3
    assert norm_error(y, plain_product(x, codes, scales, bias)) > 1e-2
