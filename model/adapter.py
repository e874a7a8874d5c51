"""The adapter that slots of several tokens alone pass, on their way through an unchanged trunk.

A slot of one token computes nothing with it. So over an untouched base the model is that base, to the bit, wherever
tokens are not merged: in prompts, in scored text, and in all answers at confidence 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """What a linear of the trunk gets for these slots beside its own: up(down(x)) (LoRA, arXiv 2106.09685)."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        added: Tensor = self.up(self.down(x))
        return added


@dataclass(frozen=True, slots=True, eq=False)
class MergedSlots:
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
            raise ValueError("merged slots have rows, or a mask.")
        return torch.where(self.mask, y + adapter(x).to(y.dtype), y)


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """What the trunk reads of a batch. x: [T, D]. merged: its slots of several tokens, where they have an adapter."""

    x: Tensor
    merged: MergedSlots | None = None
