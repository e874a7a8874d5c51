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


def gate_up(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Of a joined linear of gate and up, as `cut` wants it."""
    return [(f"mlp.{part}_proj", int(config["intermediate_size"])) for part in ("gate", "up")]
