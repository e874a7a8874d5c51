"""The weights of a LoRA adapter of the trunk (arXiv 2106.09685), which the slots of some requests pass.

    y = W x + B A x        A [rank, inputs], B [outputs, rank], for each linear that the adapter changes

Several adapters are loaded at once, and one step computes slots of all of them (ForwardBatch.loras).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hamburger.model.config import TrunkConfig
from hamburger.model.tensor_shapes import JOINED, layer_shapes


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """pairs: A and B of each changed linear, by layer and name (`self_attn.q_proj`), float32. B has the adapter's
    scaling in it."""

    pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]

    def joined(self, trunk: TrunkConfig, layer: int, name: str) -> tuple[Tensor, Tensor] | None:
        """A and B of one of JOINED, whose parts' ranks are side by side: B has zeros where a part's outputs meet
        another's rank. None where the adapter changes none of the parts."""
        parts = JOINED[name]
        found = [self.pairs.get((layer, part)) for part in parts]
        if not any(found):
            return None
        down = torch.cat([pair[0] for pair in found if pair is not None])
        shapes = layer_shapes(trunk, layer)
        up = down.new_zeros(sum(shapes[f"{part}.weight"][0] for part in parts), len(down))
        row = column = 0
        for part, pair in zip(parts, found, strict=True):
            outputs = shapes[f"{part}.weight"][0]
            if pair is not None:
                up[row : row + outputs, column : column + len(pair[0])] = pair[1]
                column += len(pair[0])
            row += outputs
        return down, up


class Loras(Protocol):
    """The adapters that a backend has loaded, by their numbers from 1. A number is never given again."""

    def load(self, number: int, weights: LoraWeights) -> None:
        """Take an adapter over, in the backend's own form; from any thread, also while a step runs. Raises RuntimeError
        or MemoryError where memory ends."""

    def unload(self, number: int) -> None:
        """Forget an adapter that no further step needs."""
