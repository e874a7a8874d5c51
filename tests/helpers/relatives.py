"""Small models of kinds that are retold as another (model/checkpoints/relatives): what transformers makes them of."""

from __future__ import annotations

from typing import Any

FACTORS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip

GRANITE4: dict[str, Any] = {
    "model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["full_attention"] * 3,
    "shared_intermediate_size": 40, "position_embedding_type": "rope", "mamba_n_heads": 8, **FACTORS,
}  # fmt: skip


def longrope(size: int) -> dict[str, Any]:
    short, long = ([start + 0.3 * i for i in range(size)] for start in (1.0, 2.5))
    return {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": short, "long_factor": long}


KINDS: dict[str, dict[str, Any]] = {
    "granite": {"model_type": "granite", "tie_word_embeddings": True, **FACTORS},
    "granite_untied": {"model_type": "granite", "tie_word_embeddings": False, **FACTORS},
    "granite_with_biases": {"model_type": "granite", "attention_bias": True, "mlp_bias": True, **FACTORS},
    "granite_without_factors": {"model_type": "granite"},
    "granitemoe": {
        "model_type": "granitemoe", "num_local_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True,
        **FACTORS,
    },
    "granitemoe_untied": {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2, **FACTORS},
    "granite4": {**GRANITE4, "tie_word_embeddings": True},
    "granite4_with_biases": {**GRANITE4, "attention_bias": True, "intermediate_size": 0},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma_untied": {
        "model_type": "gemma", "head_dim": 8, "tie_word_embeddings": False, "attention_bias": True,
        "num_key_value_heads": 1, "hidden_act": "gelu",
    },
    "phi3": {"model_type": "phi3"},
    "phi3_sliding": {"model_type": "phi3", "sliding_window": 12},
    "phi3_tied": {"model_type": "phi3", "tie_word_embeddings": True},
    "phi3_partial": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    # Texts are longer than 16 tokens, and shorter than 1,000: transformers goes by the text, we by what is served.
    "phi3_long": {
        "model_type": "phi3", "original_max_position_embeddings": 16, "rope_parameters": longrope(4)
    },
    "phi3_short": {
        "model_type": "phi3", "original_max_position_embeddings": 1000, "max_position_embeddings": 4000,
        "rope_parameters": longrope(4),
    },
    "phi4_mini": {
        "model_type": "phi3", "original_max_position_embeddings": 16, "tie_word_embeddings": True,
        "rope_parameters": {**longrope(3), "partial_rotary_factor": 0.75},
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "seed_oss_with_biases": {
        "model_type": "seed_oss", "head_dim": 8, "attention_out_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "seed_oss_without_biases": {"model_type": "seed_oss", "attention_bias": False, "head_dim": 12},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16},
    "ernie4_5_with_biases": {
        "model_type": "ernie4_5", "head_dim": 8, "use_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
    },
    "helium": {"model_type": "helium", "head_dim": 8},
    "helium_with_biases": {"model_type": "helium", "head_dim": 8, "attention_bias": True, "num_key_value_heads": 4},
    "internlm3": {"model_type": "internlm3", "head_dim": 16},
    "internlm3_with_biases": {"model_type": "internlm3", "head_dim": 8, "qkv_bias": True, "bias": True},
    "iquestcoder": {"model_type": "iquestcoder", "head_dim": 16},
    "hyperclovax": {"model_type": "hyperclovax", **FACTORS},
    "hyperclovax_tied": {
        "model_type": "hyperclovax", "head_dim": 12, "tie_word_embeddings": True, "attention_bias": True,
        "mlp_bias": True, **FACTORS, "attention_multiplier": None,
    },
    "glm": {"model_type": "glm", "head_dim": 16},
    "glm_without_biases": {
        "model_type": "glm", "head_dim": 12, "attention_bias": False, "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    "glm4": {"model_type": "glm4", "head_dim": 16, "attention_bias": False},
    "glm4_all_turns": {"model_type": "glm4", "head_dim": 8, "partial_rotary_factor": 1.0},
    "glm4_yarn": {
        "model_type": "glm4", "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.25,
        },
    },
    "glm4_dynamic": {
        "model_type": "glm4", "head_dim": 16, "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
