"""Kinds that are a Llama but for their defaults, for which linears have a bias, or for how heads turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.config.values import flag
from hamburger.model.checkpoints.relatives.parts import check_unsaid, cut, head_dim_of, orders_of
from hamburger.model.checkpoints.sources import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_HEAD_DIM = 128  # what every class here fills in


def seed_oss_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As of a Llama, or of a Qwen2, whose output projection has no bias. Raises CheckpointError."""
    return _with_biases(
        {"head_dim": _HEAD_DIM, **config},
        flag(config, "attention_bias", where, default=True),
        flag(config, "attention_out_bias", where, default=False),
        where,
    )


def internlm3_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As of a Llama. Raises CheckpointError."""
    of_qkv, of_all = (
        flag(config, name if name in config else other, where, default=False)
        for name, other in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias"))
    )
    if of_qkv != of_all:
        raise CheckpointError(f"{where}: qkv_bias is {of_qkv} and bias {of_all}; only the same is supported.")
    return {"head_dim": _HEAD_DIM, **config, "model_type": "llama", "attention_bias": of_all, "mlp_bias": of_all}


def iquestcoder_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As of a Llama. Raises CheckpointError."""
    check_unsaid(config, ("clip_qkv", "use_sliding_window"), where)
    return {"head_dim": _HEAD_DIM, **config, "model_type": "llama"}


def ernie_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As of a Llama. Raises CheckpointError."""
    defaults = {"head_dim": _HEAD_DIM, "tie_word_embeddings": True, "rope_theta": 5e5}
    has_bias = flag(config, "use_bias", where, default=False)
    return {**defaults, **config, "model_type": "llama", "attention_bias": has_bias, "mlp_bias": has_bias}


def helium_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As of a Llama, or of a Qwen2. Raises CheckpointError."""
    has_bias = flag(config, "attention_bias", where, default=False)
    return _with_biases({"head_dim": _HEAD_DIM, "rope_theta": 1e5, **config}, has_bias, False, where)


def olmoe_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As it is. Raises CheckpointError."""
    return check_unsaid(config, ("clip_qkv",), where)


def tensors_in_pairs(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """Where each number of a head turns with the next one: in the order of a Llama."""
    head_dim = head_dim_of({"head_dim": _HEAD_DIM, **config})
    return cut(tensors, {}, orders_of(config, head_dim, None, in_pairs=True))


def _with_biases(config: Mapping[str, Any], of_qkv: bool, of_o: bool, where: str) -> Mapping[str, Any]:
    if of_qkv == of_o:
        return {**config, "model_type": "llama", "attention_bias": of_qkv}
    if of_o:
        raise CheckpointError(f"{where}: attention_out_bias without attention_bias is not supported.")
    return {**config, "model_type": "qwen2", "attention_bias": True, "use_sliding_window": False}
