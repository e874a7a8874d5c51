"""MicroStepDecoder: emits the further tokens of a group, and StopHead: says whether the group goes on.

Its KV cache lives for one macro-step only. With feature positions ("positions", the published form) a group reads

    position   0 .. F-1            F                F+1        ...
    input      F feature states    embed(token 0)   embed(token 1)

and micro-step 1 runs the first F + 1 positions at once. With fused features every micro-step is one position:

    input i =  W_f [norm(feature_1); ...; norm(feature_F)] + W_e norm(embed(token i))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.config import GraftConfig, TrunkConfig
from hamburger.model.group_cache import GroupCache
from hamburger.model.modules.layers import Attend, DecoderLayer, RMSNorm
from hamburger.model.modules.linear import MakeLinear, plain_linear
from hamburger.model.modules.rotary import RotaryEmbedding


class StopHead(nn.Sequential):
    """Linear, SiLU, Linear, SiLU, Linear: state [..., D] -> stop logit [..., 1]."""

    def __init__(self, hidden_size: int, linear: MakeLinear = plain_linear) -> None:
        d = hidden_size
        super().__init__(
            linear(d, d, bias=True, part="other"),
            nn.SiLU(),
            linear(d, d, bias=True, part="other"),
            nn.SiLU(),
            linear(d, 1, bias=True, part="other"),
        )


class FeatureNorm(nn.Module):
    """An RMS norm with its own weight for each of F features: [..., F, D] -> [..., F, D]."""

    def __init__(self, features: int, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class MicroStepDecoder(nn.Module):
    """The graft's small decoder: layers of the trunk's own kind with own weights."""

    def __init__(self, trunk: TrunkConfig, graft: GraftConfig, linear: MakeLinear = plain_linear) -> None:
        super().__init__()
        d, n, eps = trunk.hidden_size, len(graft.feature_layers), trunk.rms_norm_eps
        self.layers = nn.ModuleList(DecoderLayer(trunk, 0, linear, "micro") for _ in range(graft.micro_layers))
        self.norm = RMSNorm(d, eps) if graft.micro_norm else None
        self.fused = graft.features == "fused"
        self._kv_shape = graft.max_group - 1 + (0 if self.fused else n), 2, trunk.num_kv_heads, trunk.head_dim
        if self.fused:
            self.feature_norm = FeatureNorm(n, d, eps)
            self.embedding_norm = RMSNorm(d, eps)
            self.feature_proj = linear(n * d, d, bias=False, part="micro")
            self.embedding_proj = linear(d, d, bias=False, part="micro")

    def context_of(self, features: Tensor) -> Tensor:
        """What all micro-steps of a group read, of features [R, F, D]: those, or [R, 1, D] where they are fused."""
        if self.fused:
            fused: Tensor = self.feature_proj(self.feature_norm(features).flatten(1)).unsqueeze(1)
            return fused
        return features

    def empty_kv(self, features: Tensor) -> Tensor:
        """Room for groups of up to max_group tokens with features [R, F, D]: GroupCache.kv."""
        return features.new_empty(len(self.layers), len(features), *self._kv_shape)

    def start(self, features: Tensor) -> GroupCache:
        """Begin a group for R rows with features [R, F, D]."""
        return GroupCache(self.context_of(features), self.empty_kv(features))

    def forward(self, embedding: Tensor, cache: GroupCache, rotary: RotaryEmbedding) -> Tensor:
        """One micro-step: embedding [R, D] of the group's newest token -> state [R, D]; the cache grows."""
        start, x = cache.length, embedding.unsqueeze(1)
        if self.fused or start == 0:
            x = self._inputs(x, cache.of_rows(cache.context))
        last = len(self.layers) - 1
        # Only the last position's output is read, so the last layer computes no other.
        attends = [_Cached(cache, i, last_only=i == last) for i in range(last + 1)]
        state = self._run(x, start, attends, rotary, last_only=True)[:, 0]
        cache.length += x.shape[1]
        return state

    def teacher_forced(self, embeddings: Tensor, context: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """Micro-steps 1 to J of groups at once: embeddings [R, J, D] of tokens 0.. and context_of their features ->
        states [R, J, D]."""
        x = self._inputs(embeddings, context)
        states = self._run(x, 0, [_attend] * len(self.layers), rotary, last_only=False)
        return states[:, -embeddings.shape[1] :]

    def _inputs(self, embeddings: Tensor, context: Tensor) -> Tensor:
        """embeddings [R, n, D] and context_of their features -> the inputs of the next positions: [R, n, D] where they
        are fused, else [R, F + n, D], at a group's beginning."""
        if self.fused:
            fused: Tensor = context + self.embedding_proj(self.embedding_norm(embeddings))
            return fused
        return torch.cat((context, embeddings), dim=1)

    def _run(
        self, x: Tensor, start: int, attends: Sequence[Attend], rotary: RotaryEmbedding, *, last_only: bool
    ) -> Tensor:
        """x [R, n, D] at positions start.. -> [R, n, D], or [R, 1, D] with last_only."""
        cos, sin = rotary(torch.arange(start, start + x.shape[1], device=x.device))
        for i, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            x = layer(x, cos, sin, attend, last_only=last_only and i == len(self.layers) - 1)
        states: Tensor = x if self.norm is None else self.norm(x)
        return states


class _Cached:
    """Causal attention of n new positions over a layer's cache, which it extends."""

    def __init__(self, cache: GroupCache, layer: int, last_only: bool) -> None:
        self._cache, self._layer, self._last_only = cache, layer, last_only

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self._cache.extend(self._layer, k, v)
        return _attend(q[:, -1:] if self._last_only else q, k, v)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last n positions: q [R, n, num_heads, head_dim], k and v [R, length, num_kv_heads,
    head_dim] -> [R, n, num_heads * head_dim]."""
    rows, n = q.shape[:2]
    kv_heads, length = k.shape[2], k.shape[1]
    # Query heads of one KV head and the n positions share an axis: row (position, head), head fastest.
    folded = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    mask = None
    if n > 1:
        seen = torch.arange(length - n, length, device=q.device).repeat_interleave(folded.shape[2] // n)
        mask = torch.arange(length, device=q.device) <= seen[:, None]
    out = F.scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    by_position: Tensor = out.unflatten(2, (n, -1)).permute(0, 2, 1, 3, 4)
    return by_position.reshape(rows, n, -1)
