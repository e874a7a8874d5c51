"""How linear layers are made: the modules ask for them here, so that one model's weights may lie in another form.

`plain_linear` makes nn.Linear, the reference. Other forms (oneDNN's blocks, 8 bits, a rank's share) are chosen when a
model is built, and take their weights over as they are loaded (FormedLinear); no module is replaced later.
"""

from __future__ import annotations

from typing import Literal, Protocol, Self

from torch import Tensor, nn

# layer: of the trunk. micro: of the micro decoder. adapter: of composed slots. other: embedder and stop head.
Part = Literal["layer", "micro", "adapter", "other"]


class MakeLinear(Protocol):
    """Makes a linear layer of a model."""

    def __call__(self, inputs: int, outputs: int, *, bias: bool, part: Part, split: bool = False) -> nn.Module:
        """split: each rank of a split model has some of the inputs (parallel/), so outputs are summed over ranks."""


def plain_linear(inputs: int, outputs: int, *, bias: bool, part: Part, split: bool = False) -> nn.Module:
    """nn.Linear, whatever the part."""
    return nn.Linear(inputs, outputs, bias=bias)


class FormedLinear(nn.Module):
    """A linear layer whose weights have a form of their own; for inference only."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """weight [out, in] and bias [out] are copied into that form."""
        linear = cls()
        linear.take("weight", weight)
        if bias is not None:
            linear.take("bias", bias)
        return linear

    def take(self, name: str, tensor: Tensor) -> None:
        """Bring `weight` [out, in] or `bias` [out] into that form; nothing is kept of the tensor itself."""
        raise NotImplementedError


def weights_of(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias [out] of a linear layer that plain_linear made. Raises TypeError for others."""
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"a {type(linear).__name__} gives no plain weights.")
    return linear.weight, linear.bias


def give(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a weight into the module that owns it, as its parameter or buffer `name`, or in the form that the module
    has."""
    if isinstance(module, FormedLinear):
        module.take(name, tensor)
    elif name in module._buffers:
        module._buffers[name] = tensor
    else:
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
