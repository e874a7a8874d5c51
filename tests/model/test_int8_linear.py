"""Weights as 8-bit integers: the rounding, and the linear. test_triton_int8.py has the kernels."""

from __future__ import annotations

import torch

from hamburger.model.gpu.int8 import LARGEST, Int8Linear, plain_product, to_codes
from quantised import norm_error, numbers


def test_a_number_is_kept_to_half_a_step() -> None:
    weight = numbers(24, 70)
    codes, scales = to_codes(weight)
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (24, 1))
    assert bool(((codes.float() * scales - weight).abs() <= scales / 2 * 1.0001).all())
    assert bool((codes.float().abs().amax(-1) == LARGEST).all())  # each row's largest uses the whole range


def test_zeros_stay_zeros_and_what_is_no_number_is_seen() -> None:
    weight = torch.zeros(3, 32)
    weight[1, 0], weight[2, 5] = float("nan"), float("inf")
    codes, scales = to_codes(weight)
    assert bool(codes.float().isfinite().all())  # the kernels know no other
    y = plain_product(torch.ones(1, 32), codes, scales, None)
    assert y[0, 0] == 0
    assert not bool(y[0, 1:].isfinite().any())


def test_half_the_bytes_of_bfloat16() -> None:
    linear = Int8Linear.of(numbers(256, 512).bfloat16(), None)
    assert sum(tensor.nbytes for tensor in linear.buffers()) == 256 * 512 + 256 * 4


def test_the_linear_computes_with_rounded_weights_and_whole_inputs() -> None:
    x, weight = numbers(3, 64, 1).bfloat16(), numbers(48, 64, 2)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = Int8Linear.of(weight, bias)(x.view(3, 1, 64))
    assert (y.shape, y.dtype) == ((3, 1, 48), torch.bfloat16)
    codes, scales = to_codes(weight)
    assert norm_error(y.view(3, 48), x.double() @ (codes.double() * scales).t() + bias) < 5e-3  # bfloat16's rounding
    assert 1e-3 < norm_error(y.view(3, 48), x.double() @ weight.double().t() + bias) < 2e-2
