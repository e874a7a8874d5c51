"""Granite: factors of embedding, attention, residual branches and logits are multiplied into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.relatives.parts import (
    entries_of,
    head_dim_of,
    lazy,
    multiplied,
    without_tied_head,
)

if TYPE_CHECKING:
    from torch import Tensor


def granite_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As a Llama's."""
    return {**config, "model_type": "llama"}


def granite_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """With its factors in them, in float32."""
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
        ".o_proj.": residual,
        ".down_proj.": residual,
    }
    found = without_tied_head(tensors, where) if tied != 1.0 else dict(entries_of(tensors))
    for name in found:
        factor = next((factor for part, factor in factors.items() if part in name), 1.0)
        if factor != 1.0:
            found[name] = multiplied(tensors, name, factor)
    return lazy(found)
