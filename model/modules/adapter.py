"""Adapters that some slots of a batch pass, on their way through an unchanged trunk.

Composed: of slots of several tokens. A slot of one token computes nothing with it. So over an untouched base the model
is that base, to the bit, wherever tokens are not composed: in prompts, in scored text, and in all answers at
confidence 1. LoRA: of requests that ask for one (lora.py); all other slots compute nothing with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.modules.linear import MakeLinear, plain_linear


class LowRank(nn.Module):
    """What a linear of the trunk gets for these slots beside its own: up(down(x)) (LoRA, arXiv 2106.09685)."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, linear: MakeLinear = plain_linear, *, split: bool = False
    ) -> None:
        """split: as of the linear that this belongs to."""
        super().__init__()
        self.down = linear(inputs, rank, bias=False, part="adapter", split=split)
        self.up = linear(rank, outputs, bias=False, part="adapter")

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        added: Tensor = self.up(self.down(x))
        return added


@dataclass(frozen=True, slots=True, eq=False)
class ComposedSlots:
    """Which of a batch's T slots hold several tokens.

    rows: int64 [N]; None where the device alone knows, so that all slots compute and mask (bool [T, 1]) chooses.
    """

    rows: Tensor | None
    mask: Tensor | None

    def add(self, adapter: LowRank, x: Tensor, y: Tensor) -> Tensor:
        """y [T, outputs], what a linear made of x [T, inputs], with the adapter's part for these slots."""
        if self.rows is not None:
            return y.index_copy(0, self.rows, y[self.rows] + adapter(x[self.rows]).to(y.dtype))
        if self.mask is None:
            raise ValueError("composed slots have rows, or a mask.")
        return torch.where(self.mask, y + adapter(x).to(y.dtype), y)


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """A linear's part of a LoRA adapter. down: [rank, inputs]. up: [outputs, rank]."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerLora:
    """The slots that pass one LoRA adapter in one layer. rows: int64 [N]. pairs: of qkv, o, gate_up and down, those
    that the adapter changes."""

    rows: Tensor
    pairs: Mapping[str, LoraPair]

    def add(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """y [T, outputs], what a linear made of x [T, inputs], with the adapter's part for these slots."""
        pair = self.pairs.get(name)
        if pair is None:
            return y
        return y.index_add(0, self.rows, F.linear(F.linear(x[self.rows], pair.down), pair.up).to(y.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class PassedLora:
    """The slots that pass one LoRA adapter. rows: int64 [N]. layers: its pairs in each."""

    rows: Tensor
    layers: Sequence[Mapping[str, LoraPair]]

    def layer(self, index: int) -> LayerLora:
        return LayerLora(self.rows, self.layers[index])


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """What the trunk reads of a batch. x: [T, D]. composed: its slots of several tokens, where they have an adapter.
    loras: of its slots that pass one."""

    x: Tensor
    composed: ComposedSlots | None = None
    loras: tuple[PassedLora, ...] = ()

    def loras_of(self, layer: int) -> list[LayerLora]:
        return [lora.layer(layer) for lora in self.loras]
