"""LoRA adapters as the kernels read them: in 8 bits, as the adapter of composed slots is."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hamburger.model.config import TrunkConfig
from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.weights import PackedAdapters, PackedPair, PackedWeight
from hamburger.model.kernel_shapes import GROUP
from hamburger.model.modules.lora import LoraWeights
from hamburger.model.tensor_shapes import JOINED


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
        down, up = pair
        missing = -len(down) % GROUP
        down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))
        return PackedWeight(self._kernels, down, None, 8), PackedWeight(self._kernels, up, None, 8)
