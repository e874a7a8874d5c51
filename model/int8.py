"""Linear layers whose weights are 8-bit integers, for GPUs: half the bytes of bfloat16. Inputs keep their dtype.

Each row of a weight has a float32 scale: the row's largest number over 127. Sums are float32, rounded once. (The CPU's
compiled kernels have an int8 of their own, with a scale for 32 weights and inputs of 8 bits: native.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

LARGEST = 127

# x [R, in], codes [out, in], scales [out, 1], bias [out] or None -> [R, out] of x's dtype
Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> codes int8 of -127 to 127, to the nearest, and their scales, float32 [out, 1].

    A row with NaN or infinities has such a scale, so that what it gives is no number either.
    """
    numbers = weight.float()
    scales = (numbers.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (numbers / scales).nan_to_num(0.0).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def plain_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, and what runs on a CPU."""
    y = (x.float() @ codes.float().t()) * scales.t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def product_for(device: torch.device) -> Product:
    """What multiplies on `device`: on a GPU the Triton kernels, whose package may be missing elsewhere."""
    if device.type != "cuda":
        return plain_product
    from hamburger.model.triton_int8 import scaled_product

    return partial(scaled_product, processors=torch.cuda.get_device_properties(device).multi_processor_count)


class Int8Linear(nn.Module):
    """y = x W^T + b; for inference only."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in] and bias [out] are copied. On a GPU the kernels that it needs are compiled."""
        super().__init__()
        codes, scales = to_int8(weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._product = product_for(weight.device)
        if weight.is_cuda:
            from hamburger.model.triton_int8 import ROWS_OF_ALL

            for rows in ROWS_OF_ALL:  # now, and not while a request waits
                self(weight.new_zeros(rows, weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] of x's dtype."""
        y = self._product(x.reshape(-1, x.shape[-1]), self.codes, self.scales, self.bias)
        return y.view(*x.shape[:-1], -1)
