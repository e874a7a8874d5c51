"""Rotary position embedding (arXiv 2104.09864) with the scalings of long contexts, as transformers defines them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hamburger.model.config import Rope, TrunkConfig
from hamburger.model.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
)


class RotaryEmbedding(nn.Module):
    """cos and sin tables for positions 0 .. max_positions - 1, and local ones where some layers have others."""

    def __init__(self, config: TrunkConfig, max_positions: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        scaling = config.rope_scaling
        self._scale = scaling.attention_factor if isinstance(scaling, YarnRopeScaling | LongRopeScaling) else 1.0
        positions = torch.arange(max_positions, dtype=torch.float32)
        cos, sin = self._laid_out(torch.outer(positions, inverse_frequencies(config, max_positions)))
        self.register_buffer("cos", cos.to(device, dtype), persistent=False)
        self.register_buffer("sin", sin.to(device, dtype), persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self.local_cos: Tensor
        self.local_sin: Tensor
        if config.local_rope_theta is not None:
            cos, sin = _in_order(torch.outer(positions, 1.0 / config.local_rope_theta ** _exponents(config)))
            self.register_buffer("local_cos", cos.to(device, dtype), persistent=False)
            self.register_buffer("local_sin", sin.to(device, dtype), persistent=False)

    def of_layers(self, positions: Tensor, text_lengths: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """What forward gives each layer of the trunk; alike layers share it."""
        ropes = [self.config.rope_of(layer) for layer in range(self.config.num_layers)]
        made = {rope: self(positions, text_lengths, rope) for rope in set(ropes)}
        return [made[rope] for rope in ropes]

    def forward(
        self, positions: Tensor, text_lengths: Tensor | None = None, rope: Rope = "main"
    ) -> tuple[Tensor, Tensor]:
        """cos and sin [..., 1, head_dim] for positions [...] (int64), or [1, head_dim] that change nothing for "none".

        text_lengths: int64 [...], how long the text is that each position is part of, in tokens; only the `dynamic`
        scaling looks at it, and only beyond the pretraining context.
        """
        if rope == "none":
            return torch.ones_like(self.cos[:1]), torch.zeros_like(self.sin[:1])
        if rope == "local":
            return self.local_cos[positions].unsqueeze(-2), self.local_sin[positions].unsqueeze(-2)
        cos, sin = self.cos[positions], self.sin[positions]
        if text_lengths is not None and isinstance(self.config.rope_scaling, DynamicRopeScaling):
            # For all of them, whether long or not: picking the long ones out would make a GPU's host wait.
            long, least = text_lengths > self.config.max_position_embeddings, self.config.max_position_embeddings
            freqs = _dynamic(self.config, self.config.rope_scaling.factor, text_lengths.clamp(min=least).flatten())
            own = self._laid_out(positions.flatten()[:, None].float() * freqs)
            cos, sin = (
                torch.where(long[..., None], table.view_as(kept).to(kept.dtype), kept)
                for table, kept in zip(own, (cos, sin), strict=True)
            )
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    def _laid_out(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        still = self.config.head_dim // 2 - angles.shape[-1]  # numbers of each half, which neither turn nor grow
        cos, sin = _in_order(pad(angles, (0, still)))
        scale = pad(angles.new_full(angles.shape[-1:], self._scale), (0, still), value=1.0).repeat(2)
        return cos * scale, sin * scale


def _in_order(angles: Tensor) -> tuple[Tensor, Tensor]:
    """For rotate(): x * cos + swap_halves(x) * sin, the sign of rotate_half moved into sin."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., heads, head_dim] by the tables' rows."""
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin)


def inverse_frequencies(config: TrunkConfig, max_positions: int = 0) -> Tensor:
    """Rotary frequencies, float32 [rotary_dim / 2]; `dynamic` ones are those of the pretraining context, those of
    `longrope` of texts of up to max_positions."""
    freqs = 1.0 / config.rope_theta ** _exponents(config)
    match config.rope_scaling:
        case LinearRopeScaling(factor=factor):
            return freqs / factor
        case Llama3RopeScaling() as s:
            # Wavelengths beyond the pretraining context are stretched, short ones kept, those between blended.
            turns = s.original_max_position_embeddings * freqs / (2 * math.pi)
            kept = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
            return freqs / s.factor * (1 - kept) + freqs * kept
        case YarnRopeScaling() as s:
            kept = 1 - _yarn_ramp(config, s)
            return freqs / s.factor * (1 - kept) + freqs * kept
        case LongRopeScaling() as s:
            is_long = max_positions > s.original_max_position_embeddings
            return freqs / torch.tensor(s.long_factor if is_long else s.short_factor)
    return freqs


def _exponents(config: TrunkConfig, device: torch.device | None = None) -> Tensor:
    size = _turned(config)
    return torch.arange(0, size, 2, dtype=torch.float32, device=device) / size


def _turned(config: TrunkConfig) -> int:
    """Numbers of a head that turn."""
    return config.rotary_dim or config.head_dim


def _dynamic(config: TrunkConfig, factor: float, lengths: Tensor) -> Tensor:
    """float32 [..., rotary_dim / 2] for texts of lengths [...] that the pretraining context does not hold."""
    # In float64, as torch rounds a power otherwise by its place in the tensor: the batch must not change any bit.
    growth = factor * lengths.double() / config.max_position_embeddings - (factor - 1)
    size = max(_turned(config), 3)  # of two numbers all turn by 1, whatever the base
    base = (config.rope_theta * growth ** (size / (size - 2))).float()
    return 1.0 / base.unsqueeze(-1) ** _exponents(config, lengths.device)


def _yarn_ramp(config: TrunkConfig, s: YarnRopeScaling) -> Tensor:
    """float32 [rotary_dim / 2] from 0 (kept) to 1 (stretched)."""
    size = _turned(config)

    def dimension(turns: float) -> float:
        """The place of the wavelength that turns so often in the pretraining context."""
        length = s.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(config.rope_theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
