"""Mistrals of other names: Ministral and CWM, whose layers alternate, and Ministral 3, which scales late queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamburger.model.checkpoints.config.values import whole

# What Ministral 3 turns by where nothing says it.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def ministral_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """With a window in all layers where nothing says which have it. Raises CheckpointError."""
    if config.get("layer_types") is not None:
        return config
    return {**config, "layer_types": ["sliding_attention"] * whole(config, "num_hidden_layers", where)}


def cwm_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As of a Ministral. Raises CheckpointError."""
    told = {"sliding_window": 8192, "head_dim": 128, **config, "model_type": "ministral"}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        told["rope_parameters"] = _CWM_ROPE
    if config.get("layer_types") is None:
        layers = range(whole(config, "num_hidden_layers", where))
        told["layer_types"] = ["sliding_attention" if i % 4 else "full_attention" for i in layers]
    return told


def ministral3_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As of a Mistral. Queries behind the pretraining context are scaled, which nobody computes here: no text may be
    longer. Raises CheckpointError."""
    told = {"head_dim": 128, "sliding_window": None, **config, "model_type": "mistral"}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        told["rope_parameters"] = _YARN
    rope = told.get("rope_parameters") or told.get("rope_scaling")
    if isinstance(rope, Mapping) and rope.get("llama_4_scaling_beta"):
        told["longest_text"] = whole({**told, **rope}, "original_max_position_embeddings", where)
    return told
