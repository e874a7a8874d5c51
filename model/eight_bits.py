"""Which formats of 8 bits a model's linears can have on a GPU, and how they get them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from hamburger.model.float8 import Float8Linear, fits
from hamburger.model.int8 import Int8Linear
from hamburger.model.merge_adapter import LowRank

EightBits = Literal["fp8", "int8"]


def eight_bit_linear(weight: Tensor, bias: Tensor | None, kind: EightBits) -> nn.Module | None:
    """weight [out, in] and bias [out] as a linear of that kind; None where its shape does not allow it."""
    if kind == "int8":
        return Int8Linear(weight, bias)
    return Float8Linear(weight, bias) if fits(weight) else None


def use_eight_bits(module: nn.Module, kind: EightBits) -> None:
    """Every nn.Linear below `module` that can becomes one of that kind, one at a time, so that memory peaks by one.

    Adapters of merged slots keep their numbers: they are small, and the kernels are made for wider matrices.
    """
    for parent in list(module.modules()):
        if isinstance(parent, LowRank):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                packed = eight_bit_linear(child.weight, child.bias, kind)
                if packed is not None:
                    setattr(parent, name, packed)
