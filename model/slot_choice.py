"""SlotChoice: which tokens of a chunk keep their slots when it settles. Each layer and KV head chooses for itself.

A key carries its position, so a slot may hold another token in every head. What counts is the key without its
position: where nothing was fitted to the model, how unlike its chunk's mean key it is (after KeyDiff, arXiv
2504.15364); else what a linear probe makes of it and of its value's norm, fitted to foretell which tokens later ones
look at (`hamburger fit-settle`). Keys are in the pool, so nothing is recorded while an answer grows, and a replay
chooses as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.rotary import RotaryEmbedding, rotate

_LEAST_NORM = 1e-6
# Finer differences do not count, and of equals the newest stay: a token that comes again has the same key in the first
# layer, and what rounding makes of its positions shall not decide.
PRECISION = 4096


class SlotChoice:
    """probe: float32 [layers, kv_heads, head_dim + 1], what each dimension of a key counts, and the logarithm of its
    value's norm; None where nothing was fitted."""

    def __init__(self, rotary: RotaryEmbedding, probe: Tensor | None = None) -> None:
        self._rotary = rotary
        self._probe = None if probe is None else probe.float().contiguous().to(rotary.cos.device)

    @property
    def is_fitted(self) -> bool:
        return self._probe is not None

    def settle(
        self,
        cache: PagedKVCache,
        candidates: Sequence[int],
        positions: Sequence[int],
        kept_at: Sequence[int],
        moves: Sequence[tuple[int, int]],
    ) -> None:
        """Choose among the slots of a chunk, whose tokens have these positions, and move what stays to kept_at, in the
        text's order; what (from, to) slots hold is copied at the same time. cache.settled says how many stay."""
        settled = cache.settled
        assert settled is not None
        at = torch.tensor(positions, device=self._rotary.cos.device)
        cache.settle(candidates, kept_at, moves, lambda held: settled.sources(self.stay(held, at, settled.numbers)))

    def stay(self, held: Tensor, positions: Tensor, numbers: Tensor) -> Tensor:
        """bool [layers, C, kv_heads]: which stay, in each layer and KV head `numbers` (int64 [layers, kv_heads]) of
        them. held: what the slots of one chunk hold [layers, C, 2, kv_heads, head_dim]; positions: int64 [C], of their
        tokens."""
        scores = (self.scores(held, positions) * PRECISION).round()
        rank = scores.argsort(dim=1, stable=True).argsort(dim=1)
        return rank >= held.shape[1] - numbers.to(rank.device)[:, None]

    def scores(self, held: Tensor, positions: Tensor) -> Tensor:
        """float32 [layers, C, kv_heads]; shapes as for best."""
        features = self.features(held, positions)
        if self._probe is None:
            return self.unlike(features[..., :-1])
        # A sum of products, not a matrix product: the same bits with any number of threads.
        return (features * self._probe[:, None]).sum(-1)

    def features(self, held: Tensor, positions: Tensor) -> Tensor:
        """float32 [layers, C, kv_heads, head_dim + 1]: keys without their positions, and the logarithms of values'
        norms."""
        keys, values = held[:, :, 0].float(), held[:, :, 1].float()
        of_layers = self._rotary.of_layers(positions, positions + 1)
        cos, sin = (
            torch.stack([table.expand(len(positions), 1, -1) for table in tables])
            for tables in zip(*of_layers, strict=True)
        )
        norms = values.norm(dim=-1, keepdim=True).clamp(min=_LEAST_NORM).log()
        return torch.cat((rotate(keys, cos, -sin), norms), dim=-1)

    @staticmethod
    def unlike(keys: Tensor) -> Tensor:
        """float32 [layers, C, kv_heads]: how little each key [layers, C, kv_heads, head_dim] points where its chunk's
        do in the mean, from -1 to 1."""
        units = F.normalize(keys, dim=-1)
        return -F.cosine_similarity(units, units.mean(1, keepdim=True), dim=-1)
