"""MicroStepDecoder: emits the further tokens of a group, and StopHead: says whether the group goes on.

Its KV cache lives for one macro-step only. With feature positions ("positions", the published form) a group reads

    position   0 .. F-1            F                F+1        ...
    input      F feature states    embed(token 0)   embed(token 1)

and micro-step 1 runs the first F + 1 positions at once. With fused features every micro-step is one position:

    input i =  W_f [norm(feature_1); ...; norm(feature_F)] + W_e norm(embed(token i))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.config import GraftConfig, TrunkConfig
from hamburger.model.layers import DecoderLayer, RMSNorm
from hamburger.model.micro_cache import GroupCache, MicroCache, StaticMicroCache
from hamburger.model.rotary import RotaryEmbedding


class StopHead(nn.Sequential):
    """Linear, SiLU, Linear, SiLU, Linear: state [..., D] -> stop logit [..., 1]."""

    def __init__(self, hidden_size: int) -> None:
        d = hidden_size
        super().__init__(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, 1))


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

    def __init__(self, trunk: TrunkConfig, graft: GraftConfig) -> None:
        super().__init__()
        d, n, eps = trunk.hidden_size, len(graft.feature_layers), trunk.rms_norm_eps
        self.layers = nn.ModuleList(DecoderLayer(trunk) for _ in range(graft.micro_layers))
        self.norm = RMSNorm(d, eps) if graft.micro_norm else None
        self.fused = graft.features == "fused"
        if self.fused:
            self.feature_norm = FeatureNorm(n, d, eps)
            self.embedding_norm = RMSNorm(d, eps)
            self.feature_proj = nn.Linear(n * d, d, bias=False)
            self.embedding_proj = nn.Linear(d, d, bias=False)

    def start(self, features: Tensor) -> MicroCache:
        """Begin a group for R rows with features [R, F, D]."""
        return MicroCache(self._context(features), [None] * len(self.layers))

    def start_static(self, features: Tensor, width: int) -> StaticMicroCache:
        """The same with the memory of groups of up to `width` tokens, which stays where it is."""
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        positions = width - 1 if self.fused else features.shape[1] + width - 1
        kv = features.new_zeros(len(self.layers), 2, len(features), positions, first.num_kv_heads, first.head_dim)
        return StaticMicroCache(self._context(features), kv)

    def _context(self, features: Tensor) -> Tensor:
        """What all micro-steps of a group read, of features [R, F, D]: those, or [R, 1, D] where they are fused."""
        if self.fused:
            fused: Tensor = self.feature_proj(self.feature_norm(features).flatten(1)).unsqueeze(1)
            return fused
        return features

    def forward(self, embedding: Tensor, cache: GroupCache, rotary: RotaryEmbedding) -> Tensor:
        """One micro-step: embedding [R, D] of the group's newest token -> state [R, D]; the cache grows."""
        return self._run(embedding.unsqueeze(1), cache, rotary, last_only=True)[:, 0]

    def teacher_forced(self, embeddings: Tensor, cache: GroupCache, rotary: RotaryEmbedding) -> Tensor:
        """Micro-steps 1 to J of groups just begun, at once: embeddings [R, J, D] of tokens 0.. -> states [R, J, D]."""
        return self._run(embeddings, cache, rotary, last_only=False)

    def _run(self, embeddings: Tensor, cache: GroupCache, rotary: RotaryEmbedding, *, last_only: bool) -> Tensor:
        if self.fused:
            x = cache.context + self.embedding_proj(self.embedding_norm(embeddings))
        elif cache.length == 0:
            x = torch.cat((cache.context, embeddings), dim=1)
        else:
            x = embeddings
        cos, sin = rotary(torch.arange(cache.length, cache.length + x.shape[1], device=x.device))
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            # If only the last position's output is read, the last layer computes no other.
            only = last_only and i == last
            x = layer(x, cos, sin, _Attend(cache, i, last_only=only), last_only=only)
        x = x[:, -embeddings.shape[1] :]
        states: Tensor = x if self.norm is None else self.norm(x)
        return states


class _Attend:
    """Causal attention of n new positions over a layer's cache, which it extends."""

    def __init__(self, cache: GroupCache, layer: int, last_only: bool) -> None:
        self.cache, self.layer, self.last_only = cache, layer, last_only

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.cache.extend(self.layer, k, v)
        if self.last_only:
            q = q[:, -1:]
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
