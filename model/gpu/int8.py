"""Linear layers whose weights have 8 bits, for GPUs: half the bytes of bfloat16. Inputs keep their dtype.

A weight's codes are whole numbers, and each row of it has a float32 scale: its largest number over 127. Sums are
float32, rounded once. (The CPU's compiled kernels have an int8 of their own, with a scale for 32 weights and inputs of
8 bits: cpu/library.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from hamburger.model.modules.linear import FormedLinear, Part, plain_linear

LARGEST = 127

# x [R, in], codes [out, in], scales [out, 1], bias [out] or None -> [R, out] of x's dtype
Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, N] -> codes, int8 of -127 to 127, to the nearest, and their scales, float32 [R, 1].

    A row with NaN or infinities has such a scale, so that what it gives is no number either.
    """
    numbers = x.float()
    scales = (numbers.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (numbers / scales).nan_to_num(0.0)
    return codes.round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def plain_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, and what runs on a CPU."""
    y = (x.float() @ codes.float().t()) * scales.t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def product_for(device: torch.device) -> Product:
    """What multiplies on `device`: on a GPU the Triton kernels, whose package may be missing elsewhere."""
    if device.type != "cuda":
        return plain_product
    from hamburger.model.gpu.int8_product import scaled_product

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return partial(scaled_product, processors=processors)


class Int8Linear(FormedLinear):
    """y = x W^T + b; for inference only."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        for name in ("codes", "scales", "bias"):
            self.register_buffer(name, None)

    def take(self, name: str, tensor: Tensor) -> None:
        """On a GPU the kernels that the linear needs are compiled: those without a bias, and with it once it comes."""
        if name == "bias":
            self.bias = tensor.detach().clone()
        else:
            self.codes, self.scales = to_codes(tensor.detach())
            self.product = product_for(tensor.device)
        if tensor.is_cuda and self.codes is not None:
            from hamburger.model.gpu.int8_product import ROWS_OF_ALL

            for rows in ROWS_OF_ALL:  # now, and not while a request waits
                self(tensor.new_zeros(rows, self.codes.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] of x's dtype."""
        y = self.product(x.reshape(-1, x.shape[-1]), self.codes, self.scales, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def int8_linear(inputs: int, outputs: int, *, bias: bool, part: Part, split: bool = False) -> nn.Module:
    """8 bits in trunk and micro decoder. Adapters of composed slots keep their numbers: they are small, and the kernels
    are made for wider matrices; so do embedder and stop head."""
    if part in ("layer", "micro"):
        return Int8Linear()
    return plain_linear(inputs, outputs, bias=bias, part=part, split=split)
