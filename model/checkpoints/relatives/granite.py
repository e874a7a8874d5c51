"""Granite and HyperCLOVA X: factors of embedding, attention, branches and logits are multiplied into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.config.values import flag, whole
from hamburger.model.checkpoints.experts import of_single_experts
from hamburger.model.checkpoints.relatives.joined import gate_up
from hamburger.model.checkpoints.relatives.parts import (
    cut,
    entries_of,
    head_dim_of,
    lazy,
    multiplied,
    without_tied_head,
)
from hamburger.model.checkpoints.sources import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# Names of experts -> Qwen3-MoE's; of a dense layer of Granite 4 -> Phi-3's.
EXPERTS_NAMES = {
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.router.": ".mlp.gate.",
    ".block_sparse_moe.experts.": ".mlp.experts.",
}
# HyperCLOVA X's names of norms -> Gemma 3's.
CLOVA_NAMES = {
    ".post_norm1.": ".post_attention_layernorm.",
    ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
    ".post_norm2.": ".post_feedforward_layernorm.",
}
SHARED_NAMES = {".shared_mlp.input_linear": ".mlp.gate_up_proj", ".shared_mlp.output_linear": ".mlp.down_proj"}


def granite_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As a Llama's."""
    return {**config, "model_type": "llama"}


def granite_tensors(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    where: str,
    last: tuple[str, str] = (".o_proj.", ".down_proj."),
) -> Mapping[str, Tensor]:
    """With its factors in them, in float32. last: parts of the names of what a residual branch ends with."""
    embedding, attention, residual, logits = (
        float(config.get(name, 1.0))
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    # A tied embedding is the head, too, which must not be multiplied: the norm before it takes that back.
    tied = embedding if config.get("tie_word_embeddings", False) else 1.0
    factors = {
        "model.embed_tokens.": embedding,
        "model.norm.": 1 / (logits * tied),
        ".q_proj.": attention * head_dim_of(config) ** 0.5,  # a Llama divides by the root of a head's size
        **dict.fromkeys(last, residual),
    }
    found = without_tied_head(tensors, where) if tied != 1.0 else dict(entries_of(tensors))
    for name in found:
        factor = next((factor for part, factor in factors.items() if part in name), 1.0)
        if factor != 1.0:
            found[name] = multiplied(tensors, name, factor)
    return lazy(found)


def granitemoe_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As a Mixtral's, which has another rotary base where nothing says one."""
    return {"rope_theta": 1e4, **config, "model_type": "mixtral", "sliding_window": None}


def granitemoe_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """With its factors in those of single experts."""
    return granite_tensors(config, of_single_experts(tensors), where)


def granite4_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As a Granite's. Raises CheckpointError for any but dense ones with attention in every layer."""
    number = config.get("num_local_experts", 8)
    if number != 0:
        raise CheckpointError(
            f"{where}: num_local_experts is {number!r}: of granitemoehybrid those without experts are served, as they "
            "are beside a shared one."
        )
    kinds = config.get("layer_types") or ["mamba"]
    if other := sorted({str(kind) for kind in kinds} - {"attention", "full_attention"}):
        raise CheckpointError(f"{where}: layer_types names {other[0]}, but only layers of attention are supported.")
    if (position := config.get("position_embedding_type")) != "rope":
        raise CheckpointError(f"{where}: position_embedding_type is {position!r}; only 'rope' is supported.")
    width = whole(config, "shared_intermediate_size", where, 1024)
    return {**config, "model_type": "llama", "layer_types": None, "intermediate_size": width, "mlp_bias": False}


def granite4_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """Gate and up cut apart, and the factors in them."""
    return granite_tensors(
        config, cut(tensors, {"mlp.gate_up_proj": gate_up(granite4_config(config, where))}, {}), where
    )


def clova_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As it is. Raises CheckpointError."""
    if not flag(config, "use_post_norm", where, default=True):
        raise CheckpointError(f"{where}: use_post_norm is False; only True is supported.")
    return config


def clova_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """As Granite's, but logits are multiplied, and a norm ends a residual branch."""
    attention = config.get("attention_multiplier")
    told = {
        **config,
        "logits_scaling": 1 / float(config.get("logits_scaling", 1.0)),
        "attention_multiplier": head_dim_of(config) ** -0.5 if attention is None else attention,
    }
    return granite_tensors(told, tensors, where, (".post_attention_layernorm.", ".post_feedforward_layernorm."))
