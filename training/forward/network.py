"""The differentiable forward of a HAMburger over packed examples: the served modules, without the paged cache.

Slots of several examples lie one after the other; an example attends to its own slots only, so nothing leaks between
them, and no mask is stored: each example's attention is one causal call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hamburger.model.modules.adapter import ComposedSlots
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.trunk import run_layers


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """T packed slots.

    token_ids: int64 [T, W], padded with 0; group_sizes: int64 [T]; positions: int64 [T], the index in its example of
    each slot's last token. lengths: slots of each example, in order; they add up to T.
    """

    token_ids: Tensor
    group_sizes: Tensor
    positions: Tensor
    lengths: Sequence[int]

    def to(self, device: torch.device) -> Slots:
        return Slots(self.token_ids.to(device), self.group_sizes.to(device), self.positions.to(device), self.lengths)


class PackedAttend:
    """Causal attention inside each example of a pack; with a window, to a slot itself and the window - 1 before it."""

    def __init__(self, lengths: Sequence[int], window: int | None = None) -> None:
        self.lengths = list(lengths)
        self.window = window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, num_heads * head_dim]."""
        shared = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1).unsqueeze(0).split(self.lengths, dim=2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
        outs = [
            F.scaled_dot_product_attention(a, _expand(b, shared), _expand(c, shared), **self._seen(a))
            for a, b, c in zip(q, k, v, strict=True)
        ]
        return torch.cat(outs, dim=2)[0].transpose(0, 1).flatten(1)

    def _seen(self, q: Tensor) -> dict[str, Any]:
        """What the queries [1, num_heads, n, head_dim] of an example see."""
        n = q.shape[2]
        if self.window is None or n <= self.window:
            return {"is_causal": True}
        place = torch.arange(n, device=q.device)
        distance = place[:, None] - place
        return {"attn_mask": (distance >= 0) & (distance < self.window)}


def _expand(x: Tensor, times: int) -> Tensor:
    """[1, num_kv_heads, n, head_dim] -> one copy for each query head."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def embed(model: HamburgerModel, slots: Slots) -> tuple[Tensor, ComposedSlots | None]:
    """What the trunk reads of T slots: states [T, D], and which slots pass adapters."""
    embedded: Tensor = model.embed_tokens(slots.token_ids)
    if embedded.shape[1] == 1:
        return embedded[:, 0], None
    rows = (slots.group_sizes > 1).nonzero().squeeze(-1)
    merged = ComposedSlots(rows, None) if model.config.adapter_rank else None
    return model.embedder(embedded, slots.group_sizes, rows), merged


def trunk_states(
    model: HamburgerModel, slots: Slots, feature_layers: tuple[int, ...] = (), *, checkpointing: bool = False
) -> tuple[Tensor, Tensor]:
    """The final normed state of every slot [T, D], and the feature layers' states [T, F, D].

    Works on plain and on packed linear weights; a feature layer that is the last layer means the final normed state.
    checkpointing: keep only each layer's input for the backward pass, which then computes the layer once more.
    """
    x, composed = embed(model, slots)
    angles = model.rotary.of_layers(slots.positions)
    config = model.config.trunk
    whole, sliding = PackedAttend(slots.lengths), PackedAttend(slots.lengths, config.sliding_window)

    def layer(index: int, x: Tensor) -> Tensor:
        module, attend = model.trunk.layers[index], sliding if index in config.sliding_layers else whole
        if checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(module, x, *angles[index], attend, False, composed, use_reentrant=False)
        else:
            out = module(x, *angles[index], attend, composed=composed)
        return out

    hidden, features = run_layers(len(model.trunk.layers), x, layer, feature_layers, lambda x: x, model.trunk.final)
    return hidden, torch.stack(features, dim=1) if features else hidden.new_empty(len(hidden), 0, hidden.shape[1])


def micro_states(model: HamburgerModel, features: Tensor, token_ids: Tensor) -> Tensor:
    """Teacher-forced micro-steps: features [M, F, D] and the group's tokens [M, J] -> states [M, J, D].

    State j is that of micro-step j + 1: it has read tokens 0..j and gives token j + 1.
    """
    # Under autocast a projection's output would make the residual stream bfloat16, unlike embedding and norms.
    context = model.micro_decoder.context_of(features).to(model.embed_tokens.weight.dtype)
    return model.micro_decoder.teacher_forced(model.embed_tokens(token_ids), context, model.rotary)


def micro_head(model: HamburgerModel) -> Tensor:
    """The weight of micro-steps' logits: [V, D], or [S, D] over the short list if the model has one."""
    weight = model.head_weight
    return weight.index_select(0, model.short_list) if model.has_short_list else weight


def is_for_composed(name: str) -> bool:
    """Whether a parameter of HamburgerModel is used for composed slots (of several tokens) alone."""
    return name.startswith("embedder.") or "_adapter." in name
