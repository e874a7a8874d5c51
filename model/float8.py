"""Linear layers in 8-bit floating point (e4m3), for GPUs that multiply it: half the bytes of bfloat16.

Each row of a weight has a float32 scale, and so has each row of inputs, found as it comes. Sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
WIDTH = 16  # both widths of a weight must be multiples of it
CAPABILITY = (8, 9)  # the first GPUs that multiply it


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, N] -> the same in e4m3 over its scales, float32 [R, 1]; NaN and infinities become NaN."""
    numbers = x.float()
    scale = (numbers.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (numbers / scale).to(DTYPE), scale


def scaled_product(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """e4m3 [R, in] and [out, in] with their scales -> bfloat16 [R, out], by the GPU's own instructions."""
    y: Tensor = torch._scaled_mm(x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16)
    return y


def plain_product(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """What scaled_product computes, spelt out: for devices without it, and to test it."""
    y: Tensor = (x.float() @ weight.float().t()) * x_scale * weight_scale.t()
    return y.bfloat16()


class Float8Linear(nn.Module):
    """y = x W^T + b; for inference only."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], both multiples of 16, and bias [out] are copied."""
        super().__init__()
        packed, scale = to_float8(weight.detach())
        self.register_buffer("weight", packed)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] of x's dtype."""
        rows, scale = to_float8(x.reshape(-1, x.shape[-1]))
        product = scaled_product if x.is_cuda else plain_product
        y = product(rows, scale, self.weight, self.scale).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], -1)


def fits(weight: Tensor) -> bool:
    """Whether a weight's widths allow it."""
    return all(width % WIDTH == 0 for width in weight.shape)
