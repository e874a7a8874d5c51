"""Shapes to plan with where there is no checkpoint: published trunks, and the grafts of training. No torch.

docs/scaling.md states the same numbers; tests compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hamburger.model.config import GraftConfig, ModelConfig, TrunkConfig
from hamburger.model.rope_scaling import Llama3RopeScaling

GraftName = Literal["published", "fused"]


def _llama3(
    factor: float, *, width: int, feed_forward: int, layers: int, kv_heads: int, head_dim: int, tied: bool
) -> TrunkConfig:
    return TrunkConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_layers=layers,
        num_heads=width // head_dim,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=Llama3RopeScaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )


PRESETS: dict[str, TrunkConfig] = {
    "llama-3.2-1b": _llama3(
        32.0, width=2048, feed_forward=8192, layers=16, kv_heads=8, head_dim=64, tied=True
    ),
    "llama-3.1-8b": _llama3(
        8.0, width=4096, feed_forward=14336, layers=32, kv_heads=8, head_dim=128, tied=False
    ),
    "llama-3.1-70b": _llama3(
        8.0, width=8192, feed_forward=28672, layers=80, kv_heads=8, head_dim=128, tied=False
    ),
}  # fmt: skip


def _published(last: int) -> GraftConfig:
    return GraftConfig(max_group=4, merger_heads=64, micro_layers=4, feature_layers=tuple(range(last - 3, last + 1)))


def _fused(last: int) -> GraftConfig:
    return GraftConfig(
        max_group=4,
        merger_heads=64,
        micro_layers=2,
        feature_layers=tuple(range(last - 2, last + 1)),
        features="fused",
        micro_norm=True,
        short_list_size=12288,
    )


# Which layers are features does not change a size, only how many.
_GRAFTS: dict[GraftName, Callable[[int], GraftConfig]] = {"published": _published, "fused": _fused}


def with_graft(trunk: TrunkConfig, name: GraftName) -> ModelConfig:
    """The HAMburger that training makes of a trunk: `published` (the paper's shape) or `fused` (that of the recipes
    `frozen` and `adapter`). Raises ConfigError where the trunk cannot carry it.
    """
    return ModelConfig(trunk=trunk, graft=_GRAFTS[name](trunk.num_layers - 1))
