"""Reads the trunk's geometry from a Hugging Face `config.json`. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hamburger.model.checkpoints.experts import experts_json, parse_experts
from hamburger.model.checkpoints.kinds import ACTIVATIONS, KINDS
from hamburger.model.checkpoints.relatives import RELATIVES, retold_config
from hamburger.model.checkpoints.sources import CheckpointError, read_json
from hamburger.model.config import TrunkConfig
from hamburger.model.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
    YarnRopeScaling,
    yarn_attention_factor,
)

SUPPORTED = (*KINDS, *RELATIVES)
_ROPE_NAMES: dict[type[RopeScaling], str] = {
    LinearRopeScaling: "linear",
    DynamicRopeScaling: "dynamic",
    Llama3RopeScaling: "llama3",
    YarnRopeScaling: "yarn",
}
_ROPE_TYPES = tuple(_ROPE_NAMES.values())
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

_MOST = dict.fromkeys(_SIZES, 2**31 - 1) | {"num_hidden_layers": 10_000}


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
    """A configuration as transformers writes it; `where` names it in errors."""
    if (named := config.get("model_type", "llama")) not in SUPPORTED:
        raise CheckpointError(f"{where}: model_type {named!r} is not supported; supported are: {', '.join(SUPPORTED)}.")
    config = retold_config(config, where)
    architecture = config.get("model_type", "llama")
    kind = KINDS[architecture]
    field, only = ACTIVATIONS[kind.activation]
    if config.get(field) not in (None, only):
        raise CheckpointError(f"{where}: {field} is {config[field]!r}; only {only!r} is supported.")
    if config.get("quantization_config"):
        raise CheckpointError(f"{where}: the weights are quantised (quantization_config): name unquantised ones.")
    try:
        for field in _SIZES:
            if type(config[field]) is not int or not 1 <= config[field] <= _MOST[field]:
                raise CheckpointError(
                    f"{where}: {field} is {config[field]!r}: it must be a whole number in [1, {_MOST[field]}]."
                )
        heads = int(config["num_attention_heads"])
        window, sliding = _sliding(config, where)
        theta, scaling = _rope(config, where)
        return TrunkConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=_head_dim(config, heads),
            rms_norm_eps=_positive(config["rms_norm_eps"], "rms_norm_eps", where),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", kind.tied)),
            max_position_embeddings=int(config["max_position_embeddings"]),
            eos_token_ids=_ids(config.get("eos_token_id")),
            architecture=architecture,
            **_biases(config, where),
            norms=kind.norms,
            qk_norm=kind.qk_norm,
            activation=kind.activation,
            sliding_window=window,
            sliding_layers=sliding,
            local_rope_theta=_local_theta(config, where) if sliding and kind.slides == "typed" else None,
            unturned_layers=_unturned(config, where),
            experts=parse_experts(config, kind.experts, where),
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: {error.args[0]} is missing.") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: {error}") from error


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    fixed = None if "head_dim" in config else KINDS[config.get("model_type", "llama")].head_dim
    return int(config.get("head_dim") or fixed or config["hidden_size"] // heads)


def _biases(config: Mapping[str, Any], where: str) -> dict[str, bool]:
    """Which linears have a bias: what the architecture fixes, else the configuration says."""
    architecture = config.get("model_type", "llama")
    kind, found = KINDS[architecture], {}
    for field, fixed in (("attention_bias", kind.attention_bias), ("mlp_bias", kind.mlp_bias)):
        if fixed is not None and config.get(field) not in (None, fixed):
            raise CheckpointError(f"{where}: {field} is {config[field]!r}; for {architecture} only {fixed!r} is known.")
        found[field] = bool(config.get(field, False)) if fixed is None else fixed
    attention = found["attention_bias"]
    return {"qkv_bias": attention, "o_bias": attention and kind.o_bias, "mlp_bias": found["mlp_bias"]}


def _sliding(config: Mapping[str, Any], where: str) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers that have it, with transformers' defaults for what is not said."""
    architecture, layers = config.get("model_type", "llama"), int(config["num_hidden_layers"])
    kind = KINDS[architecture]
    if kind.slides == "none":
        return None, ()
    window = config.get("sliding_window", kind.window)
    sliding: Sequence[int]
    if kind.slides == "all":
        if architecture == "mistral" and window is not None and "full_attention" in (config.get("layer_types") or ()):
            raise CheckpointError(
                f"{where}: layer_types names full_attention, and this kind of model is known with its window in all."
            )
        sliding = range(layers)
    elif "asked" in kind.slides and not config.get("use_sliding_window", False):
        return None, ()
    elif kind.slides == "all asked":
        sliding = range(layers)
    else:
        kinds = config.get("layer_types")
        if kinds is None and kind.slides == "typed":
            every = int(config.get("sliding_window_pattern") or kind.full_every)
            sliding = [i for i in range(layers) if (i + 1) % every]
        elif kinds is None and architecture == "smollm3":
            sliding = _unturned(config, where)
        elif kinds is None:
            sliding = range(min(int(config.get("max_window_layers", 28)), layers), layers)
        elif len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise CheckpointError(
                f"{where}: layer_types must name full_attention or sliding_attention for each of the {layers} layers."
            )
        else:
            sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    return (int(window), tuple(sliding)) if window is not None and len(sliding) else (None, ())


def _unturned(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The layers without rotary embedding: where `no_rope_layers` has a 0, else each `no_rope_layer_interval`-th."""
    if config.get("model_type") != "smollm3":
        return ()
    layers, turned = int(config["num_hidden_layers"]), config.get("no_rope_layers")
    if turned is None:
        interval = int(config.get("no_rope_layer_interval", 4))
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(turned, list) or len(turned) < layers or set(turned) - {0, 1}:
        raise CheckpointError(f"{where}: no_rope_layers must have a 1 or a 0 for each of the {layers} layers.")
    return tuple(i for i in range(layers) if not turned[i])


def _local_theta(config: Mapping[str, Any], where: str) -> float:
    """The rotary base of sliding layers: of `rope_parameters`, or `rope_local_base_freq`."""
    rope = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"{where}: rope_type {rope['rope_type']!r} is not supported for sliding_attention.")
    kind = KINDS[config.get("model_type", "llama")]
    default = kind.local_theta or config.get("rope_theta", kind.rope_theta)
    return _positive(rope.get("rope_theta", config.get("rope_local_base_freq", default)), "rope_local_base_freq", where)


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before); of the
    layers without a window, where kinds of layers have their own."""
    kind_of_model = KINDS[config.get("model_type", "llama")]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind_of_model.slides == "typed" and config.get("rope_parameters"):
        rope = config["rope_parameters"].get("full_attention") or {}
    theta = _positive(rope.get("rope_theta", config.get("rope_theta", kind_of_model.rope_theta)), "rope_theta", where)
    if config.get("rope_scaling") and not _says_no_more(config["rope_scaling"], {"rope_theta": theta, **rope}):
        raise CheckpointError(f"{where}: rope_scaling and rope_parameters say different things: leave one of them out.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(said.get("partial_rotary_factor") not in (None, 1) for said in (config, rope)):
        raise CheckpointError(f"{where}: partial_rotary_factor is not supported.")
    if kind == "default":
        return theta, None
    if kind not in _ROPE_TYPES:
        raise CheckpointError(
            f"{where}: rope_type {kind!r} is not supported; supported are: default, {', '.join(_ROPE_TYPES)}."
        )
    factor = float(rope["factor"])
    if factor < 1:
        raise CheckpointError(f"{where}: the rope scaling's factor is {factor:g}: it must be at least 1.")
    stated = (said.get("original_max_position_embeddings") for said in (config, rope))  # as transformers ranks them
    original = int(next(filter(None, stated), config["max_position_embeddings"]))
    match kind:
        case "linear":
            return theta, LinearRopeScaling(factor=factor)
        case "dynamic":
            return theta, DynamicRopeScaling(factor=factor)
        case "llama3":
            return theta, Llama3RopeScaling(
                factor=factor,
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=original,
            )
    factor_of_scores = rope.get("attention_factor")
    return theta, YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(
            yarn_attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
            if factor_of_scores is None
            else factor_of_scores
        ),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
    )


def _positive(value: Any, field: str, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise CheckpointError(f"{where}: {field} is {value!r}: it must be a number above 0.")
    return float(value)


def _says_no_more(scaling: Mapping[str, Any], rope: Mapping[str, Any]) -> bool:
    """Whether all that `rope_scaling` says stands in `rope_parameters`, too."""
    kinds = (dict(said, rope_type=said.get("rope_type", said.get("type", "default"))) for said in (scaling, rope))
    said, found = ({name: value for name, value in kind.items() if name != "type"} for kind in kinds)
    return said.items() <= found.items()


def trunk_config_json(t: TrunkConfig) -> dict[str, Any]:
    """The inverse of parse_trunk_config: a Hugging Face configuration."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": t.rope_theta}
    if t.rope_scaling is not None:
        rope |= {"rope_type": _ROPE_NAMES[type(t.rope_scaling)], **asdict(t.rope_scaling)}
    values: dict[str, Any] = {
        "model_type": t.architecture,
        "architectures": [KINDS[t.architecture].causal_lm],
        "vocab_size": t.vocab_size,
        "hidden_size": t.hidden_size,
        "intermediate_size": t.intermediate_size,
        "num_hidden_layers": t.num_layers,
        "num_attention_heads": t.num_heads,
        "num_key_value_heads": t.num_kv_heads,
        "head_dim": t.head_dim,
        "rms_norm_eps": t.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": t.tie_word_embeddings,
        "max_position_embeddings": t.max_position_embeddings,
        "eos_token_id": list(t.eos_token_ids),
    }
    kind = KINDS[t.architecture]
    field, activation = ACTIVATIONS[kind.activation]
    values[field] = activation
    if kind.attention_bias is None:
        values["attention_bias"] = t.qkv_bias
    if kind.mlp_bias is None:
        values["mlp_bias"] = t.mlp_bias
    if t.architecture == "smollm3":
        values["no_rope_layers"] = [int(i not in t.unturned_layers) for i in range(t.num_layers)]
    if t.experts is not None and kind.experts is not None:
        values |= experts_json(t.experts, kind.experts)
    if kind.slides in ("all", "all asked"):
        values["sliding_window"] = t.sliding_window
    elif kind.slides != "none":
        kinds = ["sliding_attention" if i in t.sliding_layers else "full_attention" for i in range(t.num_layers)]
        values |= {"sliding_window": t.sliding_window, "layer_types": kinds}
    if "asked" in kind.slides:
        values["use_sliding_window"] = t.sliding_window is not None
    elif kind.slides == "typed":
        local = {"rope_type": "default", "rope_theta": t.local_rope_theta or t.rope_theta}
        values["sliding_window"] = t.sliding_window or t.max_position_embeddings  # transformers wants a number
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    if t.architecture == "gemma3_text":
        values["query_pre_attn_scalar"] = t.head_dim  # another one is in the norm of q (relatives.py)
    return values


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ValueError(f"eos_token_id is {value!r}: it must be a token id, or a list of them.")
    return tuple(ids)
