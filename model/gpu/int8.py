"""Linear layers whose weights have 8 bits, for GPUs: half the bytes of bfloat16. Inputs keep their dtype.

A weight's codes are whole numbers (int8) or e4m3 numbers (fp8), and each row of it has a float32 scale: its largest
number over the format's. Sums are float32, rounded once. (The CPU's compiled kernels have an int8 of their own, with a
scale for 32 weights and inputs of 8 bits: library.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from hamburger.model.adapter import LowRank

EightBits = Literal["fp8", "int8"]
FLOAT8 = torch.float8_e4m3fn
LARGEST: dict[EightBits, int] = {"fp8": 448, "int8": 127}
FLOAT8_CAPABILITY = (8, 9)  # the first GPUs that multiply e4m3

# x [R, in], codes [out, in], scales [out, 1], bias [out] or None -> [R, out] of x's dtype
Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def to_codes(x: Tensor, kind: EightBits) -> tuple[Tensor, Tensor]:
    """x [R, N] -> codes, int8 of -127 to 127 or e4m3, to the nearest, and their scales, float32 [R, 1].

    A row with NaN or infinities has such a scale, so that what it gives is no number either.
    """
    numbers, largest = x.float(), LARGEST[kind]
    scales = (numbers.abs().amax(-1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (numbers / scales).nan_to_num(0.0)
    if kind == "fp8":
        return codes.to(FLOAT8), scales
    return codes.round().clamp(-largest, largest).to(torch.int8), scales


def plain_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, and what runs on a CPU."""
    y = (x.float() @ codes.float().t()) * scales.t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def plain_float8_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The reference of fp8 with many rows on a GPU that multiplies e4m3: inputs are rounded to it, too."""
    x_codes, x_scales = to_codes(x, "fp8")
    return plain_product(x_codes.float() * x_scales, codes, scales, bias).to(x.dtype)


def product_for(device: torch.device) -> Product:
    """What multiplies on `device`: on a GPU the Triton kernels, whose package may be missing elsewhere."""
    if device.type != "cuda":
        return plain_product
    from hamburger.model.gpu.int8_product import scaled_product

    of_gpu = torch.cuda.get_device_properties(device)
    has_float8 = (of_gpu.major, of_gpu.minor) >= FLOAT8_CAPABILITY
    return partial(scaled_product, processors=of_gpu.multi_processor_count, has_float8=has_float8)


class EightBitLinear(nn.Module):
    """y = x W^T + b; for inference only."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: EightBits) -> None:
        """weight [out, in] and bias [out] are copied. On a GPU the kernels that it needs are compiled."""
        super().__init__()
        codes, scales = to_codes(weight.detach(), kind)
        self.kind = kind
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.product = product_for(weight.device)
        if weight.is_cuda:
            from hamburger.model.gpu.int8_product import MOST_ROWS, ROWS_OF_ALL

            # Now, and not while a request waits. More rows launch a kernel of ours for fp8 alone.
            for rows in ROWS_OF_ALL if kind == "int8" else (*ROWS_OF_ALL, MOST_ROWS + 1):
                self(weight.new_zeros(rows, weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] of x's dtype."""
        y = self.product(x.reshape(-1, x.shape[-1]), self.codes, self.scales, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def use_eight_bits(module: nn.Module, kind: EightBits) -> None:
    """Every nn.Linear below `module` becomes one of that kind, one at a time, so that memory peaks by one.

    Adapters of merged slots keep their numbers: they are small, and the kernels are made for wider matrices.
    """
    for parent in list(module.modules()):
        if isinstance(parent, LowRank):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, EightBitLinear(child.weight, child.bias, kind))
