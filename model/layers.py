"""RMS norm, rotary embedding and the Llama decoder layer that trunk and micro decoder share.

A layer does not know where keys and values live: it hands q, k, v to an `attend` function.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.config import TrunkConfig

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


class RotaryEmbedding(nn.Module):
    """cos and sin tables for positions 0 .. max_positions - 1 (arXiv 2104.09864), with llama3 scaling if configured."""

    def __init__(self, config: TrunkConfig, max_positions: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        # Laid out for rotate(): x * cos + swap_halves(x) * sin, the sign of rotate_half moved into sin.
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1).to(device, dtype), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1).to(device, dtype), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., 1, head_dim] for positions [...] (int64)."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def inverse_frequencies(config: TrunkConfig) -> Tensor:
    """Rotary frequencies, float32 [head_dim / 2]; llama3 scaling as transformers' `_compute_llama3_parameters` does."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    freqs = 1.0 / config.rope_theta**exponents
    s = config.rope_scaling
    if s is None:
        return freqs
    # Wavelengths beyond the pretraining context are stretched, short ones kept, those between blended.
    turns = s.original_max_position_embeddings * freqs / (2 * math.pi)
    blend = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return freqs / s.factor * (1 - blend) + freqs * blend


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, head_dim] by the tables' rows."""
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin)


class DecoderLayer(nn.Module):
    """One Llama layer with fused q/k/v and gate/up projections, no biases."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        d, ff = config.hidden_size, config.intermediate_size
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.attn_norm = RMSNorm(d, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(d, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, d, bias=False)
        self.mlp_norm = RMSNorm(d, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(d, 2 * ff, bias=False)
        self.down_proj = nn.Linear(ff, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, last_only: bool = False) -> Tensor:
        """x [..., D] -> [..., D]; with last_only, x [R, n, D] -> [R, 1, D], and attend gives only that position."""
        qkv = self.qkv_proj(self.attn_norm(x)).unflatten(-1, (-1, self.head_dim))
        rotated = rotate(qkv[..., : self.num_heads + self.num_kv_heads, :], cos, sin)
        q, k = rotated.split((self.num_heads, self.num_kv_heads), dim=-2)
        attended = attend(q, k, qkv[..., self.num_heads + self.num_kv_heads :, :])
        if last_only:
            x = x[:, -1:]
        x = x + self.o_proj(attended)
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down_proj(F.silu(gate) * up)
        return out
