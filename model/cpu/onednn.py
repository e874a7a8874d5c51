"""Linear layers laid out for the machine: oneDNN's blocked weights on CPU. `nn.Linear` stays the plain reference.

At 1 to 16 rows a blocked weight is read about twice as fast as a plain one, at 300 rows as fast (docs/log.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.modules.linear import FormedLinear, Part

# The layout that oneDNN picks for this many rows served 1 to 512 rows equally well.
_ROWS_HINT = 16


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether blocked weights exist for this dtype and device in this build of torch."""
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def compiled_rows(rows: int) -> int:
    """The number of rows that `rows` are padded to.

    oneDNN compiles a kernel for each new number of rows (2.7 ms, and up to 440 KiB that it keeps), and batches with
    prompts have any number of them. Up to 64 rows, the decoding batches, padding would cost more than it spares.
    """
    step = 1 if rows <= 64 else 16 if rows <= 256 else 32
    return -(-rows // step) * step


class PackedLinear(FormedLinear):
    """y = x W^T + b with W in oneDNN's blocked layout; for inference only, x of the weight's dtype."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bias: Tensor | None = None

    def take(self, name: str, tensor: Tensor) -> None:
        if name == "weight":
            self.weight = torch.ops.mkldnn._reorder_linear_weight(tensor.detach().contiguous(), _ROWS_HINT)
        else:
            self.bias = tensor.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.shape[:-1].numel()
        if (compiled := compiled_rows(rows)) == rows:
            return self._linear(x)
        # F.pad copies all of x; the rows of the result are a view.
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, compiled - rows))
        return self._linear(padded)[:rows].view(*x.shape[:-1], -1)

    def _linear(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


def packed_linear(inputs: int, outputs: int, *, bias: bool, part: Part, split: bool = False) -> nn.Module:
    """A PackedLinear, whatever the part."""
    return PackedLinear()
