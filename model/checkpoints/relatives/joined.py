"""Kinds whose linears are joined, or whose heads turn in another order, or in part: cut apart, and put in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.relatives.parts import (
    cut,
    head_dim_of,
    kv_heads_of,
    orders_of,
    rope_of_part,
    rotary_dim_of,
)

if TYPE_CHECKING:
    from torch import Tensor

# GLM-4's names of norms -> Gemma 3's.
GLM4_NAMES = {
    ".post_self_attn_layernorm.": ".post_attention_layernorm.",
    ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
    ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
}


def phi3_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As a Mistral's; `su` and `yarn` are old names of longrope. Raises CheckpointError."""
    changes = rope_of_part(config, rotary_dim_of(config, head_dim_of(config), where))
    for field in ("rope_parameters", "rope_scaling"):
        if rope := changes.get(field):
            changes[field] = rope | {
                key: "longrope" for key in ("rope_type", "type") if rope.get(key) in ("su", "yarn")
            }
    return {
        **config,
        **changes,
        "model_type": "mistral",
        "sliding_window": config.get("sliding_window"),  # Mistral's default would be one
        "original_max_position_embeddings": config.get("original_max_position_embeddings", 4096),
    }


def phi3_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """Cut apart; where a part of a head turns, what turns is put where a Llama has it."""
    head_dim, kv_heads = head_dim_of(config), kv_heads_of(config)
    qkv = (
        ("self_attn.q_proj", int(config["num_attention_heads"]) * head_dim),
        ("self_attn.k_proj", kv_heads * head_dim),
        ("self_attn.v_proj", kv_heads * head_dim),
    )
    rotary_dim = rotary_dim_of(config, head_dim, where)
    orders = {} if rotary_dim is None else orders_of(config, head_dim, rotary_dim, in_pairs=False)
    return cut(tensors, {"self_attn.qkv_proj": qkv, "mlp.gate_up_proj": gate_up(config)}, orders)


def glm_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """With what GLM's classes fill in, and how many numbers of a head turn in our own word. Raises CheckpointError."""
    if "rotary_dim" in config:  # as we write it ourselves
        rotary_dim = config["rotary_dim"]
    else:
        rotary_dim = rotary_dim_of(config, head_dim_of(config, 128), where, 0.5)
    has_bias = config.get("attention_bias")
    return {
        **config,
        **rope_of_part(config, rotary_dim),
        "attention_bias": True if has_bias is None else has_bias,
    }


def glm_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """Gate and up cut apart, heads in the order of a Llama."""
    head_dim = head_dim_of(config, 128)
    orders = orders_of(config, head_dim, glm_config(config, where)["rotary_dim"], in_pairs=True)
    return cut(tensors, {"mlp.gate_up_proj": gate_up(config)}, orders)


def gate_up(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Of a joined linear of gate and up, as `cut` wants it."""
    return [(f"mlp.{part}_proj", int(config["intermediate_size"])) for part in ("gate", "up")]
