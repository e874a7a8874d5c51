"""Small trunks of every kind that is served: changes to small_models.trunk_config."""

from __future__ import annotations

from typing import Any

from hamburger.model.config import ExpertsConfig
from hamburger.model.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    YarnRopeScaling,
    yarn_attention_factor,
)

LLAMA3 = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = YarnRopeScaling(
    factor=4.0, original_max_position_embeddings=64, attention_factor=yarn_attention_factor(4.0), beta_fast=16.0
)
PLAIN_YARN = YarnRopeScaling(
    factor=2.5,
    original_max_position_embeddings=100,
    attention_factor=yarn_attention_factor(2.5, 1.0, 0.7),
    truncate=False,
)
QWEN3: dict[str, Any] = {"architecture": "qwen3", "qk_norm": "head", "head_dim": 16}
OLMO2: dict[str, Any] = {"architecture": "olmo2", "norms": "after", "qk_norm": "width"}
GEMMA3: dict[str, Any] = {
    "architecture": "gemma3_text", "norms": "around", "qk_norm": "head", "head_dim": 16, "activation": "gelu_tanh",
    "sliding_window": 9, "sliding_layers": (0, 1, 3), "local_rope_theta": 500.0,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "architecture": "qwen3_moe", "qk_norm": "head", "tie_word_embeddings": False,
    "experts": ExpertsConfig(number=6, per_token=2, width=32, sum_to_one=True, dense_layers=(1,)),
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "architecture": "mixtral", "tie_word_embeddings": False, "intermediate_size": 64,
    "experts": ExpertsConfig(number=4, per_token=2, width=64, sum_to_one=True),
}  # fmt: skip
# Trunks of experts, which take no graft.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_as_they_are": {
        **QWEN3_MOE, "experts": ExpertsConfig(number=5, per_token=3, width=64, sum_to_one=False),
    },
    "olmoe": {
        "architecture": "olmoe", "qk_norm": "width", "tie_word_embeddings": False, "intermediate_size": 64,
        "experts": ExpertsConfig(number=6, per_token=3, width=64, sum_to_one=False),
    },
    "mixtral": MIXTRAL,
    "mixtral_sliding": {**MIXTRAL, "sliding_window": 17, "sliding_layers": (0, 1, 2, 3)},
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one_kv_head": {"num_kv_heads": 1},
    "as_many_kv_heads": {"num_kv_heads": 4},
    "untied": {"tie_word_embeddings": False},
    "wide_heads": {"head_dim": 16},
    "llama_with_biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "linear_rope": {"rope_scaling": LinearRopeScaling(factor=3.0)},
    "dynamic_rope": {"rope_scaling": DynamicRopeScaling(factor=4.0), "max_position_embeddings": 64},
    "yarn_rope": {"rope_scaling": YARN, "max_position_embeddings": 256},
    "yarn_rope_as_stated": {"rope_scaling": PLAIN_YARN, "max_position_embeddings": 250},
    "mistral": {"architecture": "mistral", "sliding_window": 17, "sliding_layers": (0, 1, 2, 3)},
    "mistral_without_window": {"architecture": "mistral", "tie_word_embeddings": False},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True},
    "qwen2_sliding": {"architecture": "qwen2", "qkv_bias": True, "sliding_window": 9, "sliding_layers": (2, 3)},
    "qwen3": QWEN3,
    "qwen3_with_biases": {**QWEN3, "qkv_bias": True, "o_bias": True},
    "qwen3_sliding_yarn": {
        **QWEN3,
        "sliding_window": 21,
        "sliding_layers": (1, 3),
        "rope_scaling": YARN,
        "max_position_embeddings": 256,
    },
    "olmo2": OLMO2,
    "olmo2_with_biases": {**OLMO2, "qkv_bias": True, "o_bias": True, "num_kv_heads": 4, "tie_word_embeddings": False},
    "olmo3": {
        **OLMO2,
        "architecture": "olmo3",
        "sliding_window": 9,
        "sliding_layers": (0, 1, 2),
        "local_rope_theta": 10000.0,
        "rope_scaling": YARN,
        "max_position_embeddings": 256,
    },
    "exaone4": {
        "architecture": "exaone4",
        "norms": "after",
        "qk_norm": "head",
        "sliding_window": 9,
        "sliding_layers": (0, 1, 2),
        "unturned_layers": (3,),
        "rope_scaling": LLAMA3,
    },
    "gemma3": GEMMA3,
    "gemma3_stretched": {
        **GEMMA3,
        "rope_scaling": LinearRopeScaling(factor=3.0),
        "tie_word_embeddings": False,
        "qkv_bias": True,
        "o_bias": True,
    },
    "gemma3_without_window": {**GEMMA3, "sliding_window": None, "sliding_layers": (), "local_rope_theta": None},
    "smollm3": {"architecture": "smollm3", "unturned_layers": (1, 3)},
    "smollm3_sliding_yarn": {
        "architecture": "smollm3",
        "unturned_layers": (0, 3),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "sliding_window": 13,
        "sliding_layers": (0, 2),
        "rope_scaling": YARN,
        "max_position_embeddings": 256,
    },
}
