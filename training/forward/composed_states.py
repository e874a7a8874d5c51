"""The trunk's states where only composed slots (of several tokens) are trained: the base's pass, then what differs.

Up to an example's first composed slot the states are the base's, so they are computed without gradients, and with them
those that the base has for the same text in slots of one token. Then the other slots run, on the base's keys and values
before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.layers import DecoderLayer
from hamburger.model.modules.trunk import run_layers
from hamburger.training.forward.network import PackedAttend, Slots, embed

_Heads = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Uncomposed:
    """The same examples, each token its own slot. last_rows: int64 [T], the row of each slot's last token."""

    slots: Slots
    last_rows: Tensor

    def to(self, device: torch.device) -> Uncomposed:
        return Uncomposed(self.slots.to(device), self.last_rows.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class BaseStates:
    """Of N tokens. normed: what enters the layers after the first, normed, then the final normed state: each [N, D].

    heads: of each layer its rotated keys and its values, [N, kv_heads, head_dim]. features: [N, F, D].
    """

    normed: list[Tensor]
    heads: list[_Heads]
    features: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ComposedStates:
    """hidden [T, D] and features [T, F, D] of all slots. distance: float32 [], summed over the slots from each first
    composed one on: |s - b|^2 / |b|^2 of their normed states s and the base's b at their last tokens, averaged over
    layers.
    """

    hidden: Tensor
    features: Tensor
    distance: Tensor


def from_first_composed(slots: Slots) -> Tensor:
    """bool [T]: the slots from the first composed one of their example on, itself included."""
    composed = (slots.group_sizes > 1).split(list(slots.lengths))
    return torch.cat([part.cumsum(0) > 0 for part in composed])


@torch.no_grad()
def base_states(model: HamburgerModel, slots: Slots, feature_layers: tuple[int, ...]) -> BaseStates:
    """Those of slots of one token each."""
    found = BaseStates([], [], torch.empty(0))

    def attend(index: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        packed = PackedAttend(slots.lengths, _window(model, index))

        def attending(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.heads.append((k, v))
            return packed(q, k, v)

        return attending

    def layer(index: int, x: Tensor) -> Tensor:
        module = model.trunk.layers[index]
        if index:
            found.normed.append(_entering(module, x))
        out: Tensor = module(x, *angles[index], attend(index))
        return out

    x, _ = embed(model, slots)
    angles = model.rotary.of_layers(slots.positions)
    final, features = run_layers(len(model.trunk.layers), x, layer, feature_layers, lambda x: x, model.trunk.final)
    found.normed.append(final)
    return BaseStates(found.normed, found.heads, torch.stack(features, dim=1))


def composed_states(
    model: HamburgerModel, slots: Slots, uncomposed: Uncomposed, feature_layers: tuple[int, ...]
) -> ComposedStates:
    """The states of a pack whose slots of one token are the base's until a composed one comes."""
    base = base_states(model, uncomposed.slots, feature_layers)
    rows = from_first_composed(slots).nonzero().squeeze(-1)
    hidden, kept = base.normed[-1][uncomposed.last_rows], base.features[uncomposed.last_rows]
    if not len(rows):
        return ComposedStates(hidden, kept, hidden.new_zeros((), dtype=torch.float32))
    lengths = _tails(slots, rows)
    tail = Slots(slots.token_ids[rows], slots.group_sizes[rows], slots.positions[rows], lengths)
    same, starts = uncomposed.last_rows[rows], _starts(uncomposed.slots)
    before = [whole - part for whole, part in zip(slots.lengths, lengths, strict=True)]
    x, composed = embed(model, tail)
    angles = model.rotary.of_layers(tail.positions)
    num_layers = len(model.trunk.layers)
    distances = [x.new_zeros((), dtype=torch.float32)]

    def layer(index: int, x: Tensor) -> Tensor:
        module = model.trunk.layers[index]
        if index:
            normed = _entering(module, x)
            distances.append(distances[-1] + _distance(normed, base.normed[index - 1][same]))
        attend = _Tail(lengths, before, starts, base.heads[index], _window(model, index))
        out: Tensor = module(x, *angles[index], attend, composed=composed)
        return out

    final, features = run_layers(num_layers, x, layer, feature_layers, lambda x: x, model.trunk.final)
    distance = (distances[-1] + _distance(final, base.normed[-1][same])) / num_layers
    return ComposedStates(
        hidden.index_copy(0, rows, final.to(hidden.dtype)),
        kept.index_copy(0, rows, torch.stack(features, dim=1).to(kept.dtype)),
        distance,
    )


class _Tail:
    """Attention of the last slots of each example over themselves and the base's keys and values before them."""

    def __init__(
        self, lengths: list[int], before: list[int], starts: list[int], heads: _Heads, window: int | None
    ) -> None:
        self._lengths, self._before, self._starts, self._heads, self._window = lengths, before, starts, heads, window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [R, num_heads, head_dim], k and v [R, num_kv_heads, head_dim] -> [R, num_heads * head_dim]."""
        parts = zip(q.split(self._lengths), k.split(self._lengths), v.split(self._lengths), strict=True)
        outs = [
            self._example(own, before, start)
            for own, before, start in zip(parts, self._before, self._starts, strict=True)
            if len(own[0])
        ]
        return torch.cat(outs)

    def _example(self, own: tuple[Tensor, Tensor, Tensor], before: int, start: int) -> Tensor:
        q, k, v = own
        whole = (torch.cat((past[start : start + before].to(q.dtype), new.to(q.dtype))) for past, new in
                zip(self._heads, (k, v), strict=True))  # fmt: skip
        shared = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(shared, dim=1).transpose(0, 1) for x in whole)
        place = torch.arange(before + len(q), device=q.device)
        distance = place[before:, None] - place
        seen = (distance >= 0) & (distance < (self._window or before + len(q)))
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen)
        return out[0].transpose(0, 1).flatten(1)


def _entering(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, DecoderLayer)
    return layer.entering(x)


def _distance(states: Tensor, base: Tensor) -> Tensor:
    off, size = (states.float() - base.float()).square().sum(-1), base.float().square().sum(-1)
    return (off / size).sum()


def _window(model: HamburgerModel, layer: int) -> int | None:
    config = model.config.trunk
    return config.sliding_window if layer in config.sliding_layers else None


def _tails(slots: Slots, rows: Tensor) -> list[int]:
    """How many of `rows` each example has."""
    chosen = torch.zeros(len(slots.positions), dtype=torch.int64, device=rows.device).index_fill(0, rows, 1)
    return [int(part.sum()) for part in chosen.split(list(slots.lengths))]


def _starts(slots: Slots) -> list[int]:
    ends = torch.tensor([0, *slots.lengths]).cumsum(0)
    starts: list[int] = ends[:-1].tolist()
    return starts
