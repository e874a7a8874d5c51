"""GroupCache: keys and values of the groups being emitted, for one macro-step. Every backend has this one form."""

from __future__ import annotations

import torch
from torch import Tensor


class GroupCache:
    """A place for each of the P rows whose groups began, and each position of a group at its own place in it.

    context: [P, ...], what the micro-steps of a place read beside tokens. kv: [layers, P, positions, 2, num_kv_heads,
    head_dim], key and value. rows: int64 [R], the places of the rows that still go on; None: all, in order. length:
    positions held. Only Python knows the length, so a captured micro-step (CUDA graphs) is the one of that length.
    """

    def __init__(self, context: Tensor, kv: Tensor, rows: Tensor | None = None, length: int = 0) -> None:
        self.context, self.kv, self.rows, self.length = context, kv, rows, length
        self._places = rows

    @property
    def places(self) -> Tensor:
        """int64 [R]: `rows`, written out."""
        if self._places is None:
            self._places = torch.arange(self.kv.shape[1], device=self.kv.device)
        return self._places

    def select(self, rows: Tensor) -> GroupCache:
        """The cache of some of its rows only (int64 [R'], into R)."""
        places = rows if self.rows is None else self.rows.index_select(0, rows)
        return GroupCache(self.context, self.kv, places, self.length)

    def of_rows(self, x: Tensor) -> Tensor:
        """x [P, ...] of the rows that still go on, [R, ...]."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put key and value [R, n, num_kv_heads, head_dim] of the next n positions in; returns all of the layer's,
        [R, length + n, num_kv_heads, head_dim]. Whoever extended every layer adds n to `length`."""
        end = self.length + key.shape[1]
        into = self.kv[layer, :, self.length : end]
        both = torch.stack((key, value), dim=2)
        if self.rows is None:
            into.copy_(both)
        else:
            into.index_copy_(0, self.rows, both.to(into.dtype))
        both = self.of_rows(self.kv[layer, :, :end])
        return both[:, :, 0], both[:, :, 1]
