"""Keys and values of the groups being emitted, for one macro-step: a cache that grows, and one of fixed addresses."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class GroupCache(Protocol):
    """What the micro-step decoder reads and extends; context: [R, F, D], or [R, 1, D] of fused features."""

    context: Tensor

    @property
    def length(self) -> int:
        """Positions held so far."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append key and value [R, n, num_kv_heads, head_dim] of the next n positions; returns all of the layer's."""


class MicroCache:
    """Grows by the positions of each micro-step: per layer [R, length, num_kv_heads, head_dim]."""

    def __init__(self, context: Tensor, layers: list[tuple[Tensor, Tensor] | None]) -> None:
        self.context = context
        self.layers = layers

    @property
    def length(self) -> int:
        first = self.layers[0]
        return 0 if first is None else first[0].shape[1]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        held = self.layers[layer]
        if held is not None:
            key, value = torch.cat((held[0], key), dim=1), torch.cat((held[1], value), dim=1)
        self.layers[layer] = (key, value)
        return key, value

    def select(self, rows: Tensor) -> MicroCache:
        """The cache of some rows only (int64 [R'])."""
        return MicroCache(
            self.context.index_select(0, rows),
            [kv and (kv[0].index_select(0, rows), kv[1].index_select(0, rows)) for kv in self.layers],
        )


class StaticMicroCache:
    """Written by position into tensors that stay where they are, so that a CUDA graph can read them again.

    Only Python knows its length: a captured micro-step is the one of that length.
    kv: [layers, key and value, R, most positions, num_kv_heads, head_dim].
    """

    def __init__(self, context: Tensor, kv: Tensor) -> None:
        self.context = context
        self._kv = kv
        self._lengths = [0] * len(kv)

    @property
    def length(self) -> int:
        return self._lengths[0]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        start, end = self._lengths[layer], self._lengths[layer] + key.shape[1]
        keys, values = self._kv[layer]
        keys[:, start:end] = key
        values[:, start:end] = value
        self._lengths[layer] = end
        return keys[:, :end], values[:, :end]
