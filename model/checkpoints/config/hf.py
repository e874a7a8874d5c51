"""Reads the trunk's geometry from a Hugging Face `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hamburger.model.checkpoints.config.kinds import ACTIVATIONS, KINDS
from hamburger.model.checkpoints.config.rope import parse_local_theta, parse_rope, rope_json
from hamburger.model.checkpoints.config.unfit import why_unfit
from hamburger.model.checkpoints.config.values import flag, positive, whole
from hamburger.model.checkpoints.experts import experts_json, parse_experts
from hamburger.model.checkpoints.quantised.methods import parse_quantisation, read_config
from hamburger.model.checkpoints.relatives.retelling import RELATIVES, retold_config, turned_linears
from hamburger.model.checkpoints.sources import CheckpointError, read_json
from hamburger.model.config import TrunkConfig

SUPPORTED = tuple(dict.fromkeys((*KINDS, *RELATIVES)))
_MOST_LAYERS = 10_000


def read_trunk_config(folder: Path) -> TrunkConfig:
    """The trunk described by folder/config.json and folder/generation_config.json (whose end tokens win).

    Raises CheckpointError that names the field which is missing or not supported.
    """
    config = read_config(folder)
    generation = folder / "generation_config.json"
    if generation.is_file() or generation.is_symlink():  # a link to nothing is told
        end = read_json(generation).get("eos_token_id")
        config = config if end is None else {**config, "eos_token_id": end}
    return parse_trunk_config(config, str(folder / "config.json"))


def parse_trunk_config(config: Mapping[str, Any], where: str) -> TrunkConfig:
    """A configuration as transformers writes it; `where` names it in errors."""
    if (named := config.get("model_type", "llama")) not in SUPPORTED:
        raise CheckpointError(
            f"{where}: model_type {named!r} is not supported{why_unfit(named)}; supported are: {', '.join(SUPPORTED)}."
        )
    try:
        retold_from = turned_linears(config, where) or _retold_from(config, where)
        config = retold_config(config, where)
        architecture = config.get("model_type", "llama")
        kind = KINDS[architecture]
        field, only = ACTIVATIONS[kind.activation]
        if config.get(field) not in (None, only):
            raise CheckpointError(f"{where}: {field} is {config[field]!r}; only {only!r} is supported.")
        parse_quantisation(config, where)  # what cannot be read is told before any weights are looked for
        layers = whole(config, "num_hidden_layers", where, most=_MOST_LAYERS)
        size, heads = (whole(config, field, where) for field in ("hidden_size", "num_attention_heads"))
        window, sliding = _sliding(config, layers, where)
        theta, scaling = parse_rope(config, where)
        return TrunkConfig(
            vocab_size=whole(config, "vocab_size", where),
            hidden_size=size,
            intermediate_size=whole(config, "intermediate_size", where),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=whole(config, "num_key_value_heads", where, heads),
            head_dim=_head_dim(config, size // heads, where),
            rms_norm_eps=positive(config, "rms_norm_eps", where),
            rope_theta=theta,
            rope_scaling=scaling,
            rotary_dim=_rotary_dim(config, where),
            tie_word_embeddings=flag(config, "tie_word_embeddings", where, default=kind.tied),
            max_position_embeddings=whole(config, "max_position_embeddings", where),
            longest_text=_longest_text(config, where),
            eos_token_ids=_ids(config.get("eos_token_id")),
            architecture=architecture,
            **_biases(config, where),
            norms=kind.norms,
            qk_norm=kind.qk_norm,
            activation=kind.activation,
            sliding_window=window,
            sliding_layers=sliding,
            local_rope_theta=parse_local_theta(config, where) if sliding and kind.slides == "typed" else None,
            unturned_layers=_unturned(config, layers, where),
            experts=parse_experts(config, kind.experts, where),
            retold_from=retold_from,
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: {error.args[0]} is missing.") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: {error}") from error


def _head_dim(config: Mapping[str, Any], of_hidden: int, where: str) -> int:
    fixed = None if "head_dim" in config else KINDS[config.get("model_type", "llama")].head_dim
    return whole(config, "head_dim", where, fixed or of_hidden)


def _rotary_dim(config: Mapping[str, Any], where: str) -> int | None:
    """Our own word, which a Phi-3 or a GLM is retold with (relatives/)."""
    is_told = KINDS[config.get("model_type", "llama")].turns_part and config.get("rotary_dim") is not None
    return whole(config, "rotary_dim", where) if is_told else None


def _longest_text(config: Mapping[str, Any], where: str) -> int | None:
    """Our own word, too, which a Ministral 3 is retold with."""
    is_told = config.get("model_type") == "mistral" and config.get("longest_text") is not None
    return whole(config, "longest_text", where) if is_told else None


def _retold_from(config: Mapping[str, Any], where: str) -> str | None:
    """Our own word, too, of a trunk that was written after its weights were retold."""
    told = config.get("retold_from")
    if told is not None and not isinstance(told, str):
        raise CheckpointError(f"{where}: retold_from is {told!r}: it must be a model_type.")
    return told


def _biases(config: Mapping[str, Any], where: str) -> dict[str, bool]:
    """Which linears have a bias: what the architecture fixes, else the configuration says."""
    architecture = config.get("model_type", "llama")
    kind, found = KINDS[architecture], {}
    for field, fixed in (("attention_bias", kind.attention_bias), ("mlp_bias", kind.mlp_bias)):
        if fixed is not None and config.get(field) not in (None, fixed):
            raise CheckpointError(f"{where}: {field} is {config[field]!r}; for {architecture} only {fixed!r} is known.")
        found[field] = flag(config, field, where, default=False) if fixed is None else fixed
    attention = found["attention_bias"]
    return {"qkv_bias": attention, "o_bias": attention and kind.o_bias, "mlp_bias": found["mlp_bias"]}


def _sliding(config: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers that have it, with transformers' defaults for what is not said."""
    architecture = config.get("model_type", "llama")
    kind = KINDS[architecture]
    if kind.slides == "none":
        return None, ()
    window = config.get("sliding_window", kind.window)
    if window is None:
        return None, ()
    sliding: Sequence[int]
    if kind.slides == "all":
        if architecture == "mistral" and "full_attention" in (config.get("layer_types") or ()):
            raise CheckpointError(
                f"{where}: layer_types names full_attention, and this kind of model is known with its window in all."
            )
        sliding = range(layers)
    elif "asked" in kind.slides and not flag(config, "use_sliding_window", where, default=False):
        return None, ()
    elif kind.slides == "all asked":
        sliding = range(layers)
    else:
        kinds = config.get("layer_types")
        if kinds is None and kind.slides.startswith("typed"):
            every = whole(config, "sliding_window_pattern", where, kind.full_every)
            sliding = [i for i in range(layers) if (i + 1) % every]
        elif kinds is None and architecture == "smollm3":
            sliding = _unturned(config, layers, where)
        elif kinds is None:
            sliding = range(min(whole(config, "max_window_layers", where, 28, least=0), layers), layers)
        elif len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise CheckpointError(
                f"{where}: layer_types must name full_attention or sliding_attention for each of the {layers} layers."
            )
        else:
            sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if not len(sliding):
        return None, ()
    return whole(config, "sliding_window", where, window), tuple(sliding)


def _unturned(config: Mapping[str, Any], layers: int, where: str) -> tuple[int, ...]:
    """The layers without rotary embedding: where `no_rope_layers` has a 0, else each `no_rope_layer_interval`-th; of
    EXAONE 4 those without a window, where any may have one."""
    kind = config.get("model_type")
    if kind == "exaone4" and config.get("sliding_window", KINDS[kind].window) is not None:
        _, sliding = _sliding(config, layers, where)
        return tuple(i for i in range(layers) if i not in sliding)
    if kind != "smollm3":
        return ()
    turned = config.get("no_rope_layers")
    if turned is None:
        interval = whole(config, "no_rope_layer_interval", where, 4)
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(turned, list) or len(turned) < layers or set(turned) - {0, 1}:
        raise CheckpointError(f"{where}: no_rope_layers must have a 1 or a 0 for each of the {layers} layers.")
    return tuple(i for i in range(layers) if not turned[i])


def trunk_config_json(t: TrunkConfig) -> dict[str, Any]:
    """The inverse of parse_trunk_config: a Hugging Face configuration."""
    rope = rope_json(t.rope_theta, t.rope_scaling)
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
    if kind.turns_part:
        values["rotary_dim"] = t.rotary_dim
    if t.longest_text is not None:
        values["longest_text"] = t.longest_text
    if t.retold_from is not None:
        values["retold_from"] = t.retold_from
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
    elif t.architecture == "exaone4" and t.unturned_layers:
        values["sliding_window"] = t.sliding_window or t.max_position_embeddings  # none at all: every layer would turn
    if t.architecture == "gemma3_text":
        values["query_pre_attn_scalar"] = t.head_dim  # another one is in the norm of q (relatives/)
    return values


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ValueError(f"eos_token_id is {value!r}: it must be a token id, or a list of them.")
    return tuple(ids)
