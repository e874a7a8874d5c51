"""RMS norm and the decoder layer of the Llama family that trunk and micro decoder share.

A layer does not know where keys and values live: it hands q, k, v to an `attend` function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.config import TrunkConfig
from hamburger.model.rotary import rotate

# (q [..., num_heads, head_dim], k and v [..., num_kv_heads, head_dim]) -> [..., num_heads * head_dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, normalised in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DecoderLayer(nn.Module):
    """One layer with fused q/k/v and gate/up projections; biases, and norms of q and k, where its kind has them."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        d, ff = config.hidden_size, config.intermediate_size
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.attn_norm = RMSNorm(d, config.rms_norm_eps)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(d, width, bias=config.qkv_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, d, bias=config.o_bias)
        self.mlp_norm = RMSNorm(d, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(d, 2 * ff, bias=config.mlp_bias)
        self.down_proj = nn.Linear(ff, d, bias=config.mlp_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, last_only: bool = False) -> Tensor:
        """x [..., D] -> [..., D]; with last_only, x [R, n, D] -> [R, 1, D], and attend gives only that position."""
        attended = attend(*self.heads(x, cos, sin))
        return self.finish(x[:, -1:] if last_only else x, attended)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `attend` is given for x [..., D]: q, k and v, the first two rotated."""
        qkv = self.qkv_proj(self.attn_norm(x)).unflatten(-1, (-1, self.head_dim))
        heads = qkv[..., : self.num_heads + self.num_kv_heads, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = heads.split((self.num_heads, self.num_kv_heads), dim=-2)
            heads = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        q, k = rotate(heads, cos, sin).split((self.num_heads, self.num_kv_heads), dim=-2)
        return q, k, qkv[..., self.num_heads + self.num_kv_heads :, :]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's result [..., D] of its input x and of what the heads saw, [..., num_heads * head_dim]."""
        x = x + self.o_proj(attended)
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down_proj(F.silu(gate) * up)
        return out
