"""MergeAdapter: what slots of several tokens add to their states on their way through an unchanged trunk.

A slot of one token adds nothing. So a model that has no other change to its trunk is the base model wherever tokens are
not merged: in prompts, in scored text, and in all answers at confidence 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.config import GraftConfig, TrunkConfig


class LayerAdapter(nn.Module):
    """The adapter of one trunk layer: up(silu(down(x / rms(x)) + shift)), with a shift that the group's tokens give."""

    def __init__(self, hidden_size: int, width: int, eps: float) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(width, hidden_size, bias=False)
        self.eps = eps

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        """x [..., D], the states that enter the layer, and shift [..., width] -> what is added to them [..., D]."""
        added: Tensor = self.up(F.silu(self.down(F.rms_norm(x, x.shape[-1:], None, self.eps)) + shift))
        return added


class MergeAdapter(nn.Module):
    """A bottleneck adapter (Houlsby et al., arXiv 1902.00751) before each trunk layer, for slots of several tokens.

        e = [E(t_1) / rms; ...; E(t_n) / rms], its last token at the last of max_group places, zeros before the first
        z = code_out(silu(code_in(e))) / rms
        x = x + up_l(silu(down_l(x / rms(x)) + shift_l(z)))          before layer l

    The trunk's attention between the tokens of a group is what a merged slot misses; z tells each layer which they are.
    """

    def __init__(self, trunk: TrunkConfig, graft: GraftConfig) -> None:
        super().__init__()
        d, width, eps = trunk.hidden_size, graft.merge_adapter_width, trunk.rms_norm_eps
        self.max_group, self.width, self.eps = graft.max_group, width, eps
        self.code_in = nn.Linear(graft.max_group * d, d)
        self.code_out = nn.Linear(d, graft.merge_code_size)
        self.shift = nn.Linear(graft.merge_code_size, trunk.num_layers * width, bias=False)  # of all layers
        self.layers = nn.ModuleList(LayerAdapter(d, width, eps) for _ in range(trunk.num_layers))

    def shifts(self, embeddings: Tensor, sizes: Tensor) -> Tensor:
        """embeddings [N, W, D] of the tokens of N groups (padding ignored), sizes int64 [N] -> [layers, N, width]."""
        n, given, d = embeddings.shape
        places = torch.arange(self.max_group, device=sizes.device) - (self.max_group - sizes[:, None])  # [N, max_group]
        normed = F.rms_norm(embeddings, (d,), None, self.eps)
        tokens = normed.gather(1, places.clamp(0, given - 1)[..., None].expand(-1, -1, d))
        tokens = tokens.masked_fill((places < 0)[..., None], 0)
        code = self.code_out(F.silu(self.code_in(tokens.flatten(1))))
        code = F.rms_norm(code, code.shape[-1:], None, self.eps).to(embeddings.dtype)
        shifts: Tensor = self.shift(code).view(n, len(self.layers), self.width).transpose(0, 1)
        return shifts.contiguous()

    def forward(self, embeddings: Tensor, sizes: Tensor, rows: Tensor | None) -> MergedSlots:
        """embeddings [T, W, D] and sizes int64 [T] of a batch's slots. rows: int64 [N], the slots of several tokens;
        None where the device alone knows them, so that all slots are computed, some for nothing."""
        if rows is None:
            return MergedSlots(self, None, (sizes > 1)[:, None], self.shifts(embeddings, sizes))
        return MergedSlots(self, rows, None, self.shifts(embeddings[rows], sizes[rows]))


@dataclass(frozen=True, slots=True, eq=False)
class MergedSlots:
    """The slots of several tokens in one batch. rows: int64 [N], which; None: all T, where mask (bool [T, 1]) holds.

    shifts: [layers, N or T, width].
    """

    adapter: MergeAdapter
    rows: Tensor | None
    mask: Tensor | None
    shifts: Tensor

    def enter(self, layer: int, x: Tensor) -> Tensor:
        """States [T, D] that leave one layer -> those that enter layer number `layer`."""
        if self.rows is None:
            return self.at(layer)(x)
        states = x.index_select(0, self.rows)
        added = self.adapter.layers[layer](states, self.shifts[layer])
        return x.index_copy(0, self.rows, states + added.to(x.dtype))

    def at(self, layer: int) -> LayerEntry:
        """What all slots do before one layer, in a form for functions that are compiled once for all layers."""
        adapter = self.adapter.layers[layer]
        if self.mask is None or not isinstance(adapter, LayerAdapter):
            raise ValueError("only slots under a mask keep their shape from step to step.")
        return LayerEntry(adapter, self.mask, self.shifts[layer])


@dataclass(frozen=True, slots=True, eq=False)
class LayerEntry:
    """Before one layer: its adapter for the slots where mask (bool [T, 1]) holds, with shift [T, width]."""

    adapter: LayerAdapter
    mask: Tensor
    shift: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return torch.where(self.mask, x + self.adapter(x, self.shift).to(x.dtype), x)


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """What the trunk reads of a batch. x: [T, D]. merged: its slots of several tokens, where they have an adapter."""

    x: Tensor
    merged: MergedSlots | None = None
