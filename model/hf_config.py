"""Reads the trunk's geometry from a Hugging Face `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hamburger.model.config import Llama3RopeScaling, TrunkConfig
from hamburger.model.sources import CheckpointError, read_json

SUPPORTED = ("llama",)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def read_trunk_config(folder: Path) -> TrunkConfig:
    """The trunk described by folder/config.json and folder/generation_config.json (whose end tokens win).

    Raises CheckpointError that names the field which is missing or not supported.
    """
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        end = read_json(generation).get("eos_token_id")
        config = config if end is None else {**config, "eos_token_id": end}
    return parse_trunk_config(config, str(folder / "config.json"))


def parse_trunk_config(config: Mapping[str, Any], where: str) -> TrunkConfig:
    """A Llama config as transformers writes it; `where` names it in errors."""
    model_type = config.get("model_type", "llama")
    if model_type not in SUPPORTED:
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is not supported; supported are: {', '.join(SUPPORTED)}."
        )
    for field, needed in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if config.get(field) not in (None, needed):
            raise CheckpointError(f"{where}: {field} is {config[field]!r}; only {needed!r} is supported.")
    if config.get("quantization_config"):
        raise CheckpointError(f"{where}: the weights are quantised (quantization_config): name unquantised ones.")
    try:
        for field in _SIZES:
            if int(config[field]) < 1:
                raise CheckpointError(f"{where}: {field} is {config[field]!r}: it must be at least 1.")
        heads = int(config["num_attention_heads"])
        theta, scaling = _rope(config, where)
        return TrunkConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=int(config["max_position_embeddings"]),
            eos_token_ids=_ids(config.get("eos_token_id")),
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: {error.args[0]} is missing.") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: {error}") from error


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, Llama3RopeScaling | None]:
    """theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor is not supported.")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"{where}: rope_type {kind!r} is not supported; supported are: default, llama3.")
    return theta, Llama3RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def trunk_config_json(t: TrunkConfig) -> dict[str, Any]:
    """The inverse of parse_trunk_config: a Hugging Face Llama config."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": t.rope_theta}
    if t.rope_scaling is not None:
        s = t.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position_embeddings,
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": t.vocab_size,
        "hidden_size": t.hidden_size,
        "intermediate_size": t.intermediate_size,
        "num_hidden_layers": t.num_layers,
        "num_attention_heads": t.num_heads,
        "num_key_value_heads": t.num_kv_heads,
        "head_dim": t.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": t.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": t.tie_word_embeddings,
        "max_position_embeddings": t.max_position_embeddings,
        "eos_token_id": list(t.eos_token_ids),
    }


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
