"""LoRA adapters as the kernels read them: in 8 bits, as the adapter of composed slots is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import TrunkConfig
from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.weights import PackedAdapters, PackedPair, PackedWeight
from hamburger.model.kernel_shapes import GROUP
from hamburger.model.modules.lora import LoraWeights
from hamburger.model.tensor_shapes import JOINED

_MOST_EXPONENT = 44  # of both matrices' largest numbers: 127 * 65504 is 2^23 for each


class CpuLoras:
    """A Loras (model/modules/lora.py). Ranks are filled up with zeros to whole groups, which changes no sum."""

    def __init__(self, kernels: Kernels, trunk: TrunkConfig) -> None:
        self._kernels, self._trunk = kernels, trunk
        self._adapters: dict[int, PackedAdapters] = {}

    def load(self, number: int, weights: LoraWeights) -> None:
        layers = range(self._trunk.num_layers)
        self._adapters[number] = PackedAdapters(
            [self._packed(weights.joined(self._trunk, layer, name)) for layer in layers for name in JOINED]
        )

    def unload(self, number: int) -> None:
        del self._adapters[number]

    def adapters(self, number: int) -> PackedAdapters:
        return self._adapters[number]

    def _packed(self, pair: tuple[Tensor, Tensor] | None) -> PackedPair:
        if pair is None:
            return None
        down, up = _balanced(*pair)
        missing = -len(down) % GROUP
        down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))
        return PackedWeight(self._kernels, down, None, 8), PackedWeight(self._kernels, up, None, 8)


def _balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same product, of matrices whose largest numbers have about one size: scales are in half precision, which ends
    at some 1e-7 and 65504. By a power of two, which is exact. Raises CheckpointError where both are too large."""
    if not down.any() or not up.any():  # then all is 0, whatever the other holds
        return torch.zeros_like(down), torch.zeros_like(up)
    exponents = [int(torch.frexp(weight.abs().max()).exponent) for weight in (down, up)]
    if sum(exponents) > _MOST_EXPONENT:
        raise CheckpointError("The adapter's numbers are too large for the CPU kernels: use quantization none.")
    shift = (exponents[1] - exponents[0]) // 2
    return torch.ldexp(down, torch.tensor(shift)), torch.ldexp(up, torch.tensor(-shift))
