"""How a Hugging Face configuration says what turns keys: rotary bases and scalings. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hamburger.model.checkpoints.config.kinds import KINDS, Kind
from hamburger.model.checkpoints.config.values import flag, positive, whole
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)

_ROPE_NAMES: dict[type[RopeScaling], str] = {
    LinearRopeScaling: "linear",
    DynamicRopeScaling: "dynamic",
    Llama3RopeScaling: "llama3",
    YarnRopeScaling: "yarn",
    LongRopeScaling: "longrope",
}
_ROPE_TYPES = tuple(_ROPE_NAMES.values())


def parse_rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before); of the
    layers without a window, where kinds of layers have their own.

    Raises KeyError for a missing field, and CheckpointError for what is not supported.
    """
    kind_of_model = _kind_of(config)
    parameters, of_old = (_mapping(config, field, where) for field in ("rope_parameters", "rope_scaling"))
    rope = parameters or of_old
    if kind_of_model.slides == "typed" and parameters:
        rope = _mapping(parameters, "full_attention", where)
    theta = _theta(rope, config, where, kind_of_model.rope_theta)
    if of_old and not _says_no_more(of_old, {"rope_theta": theta, **rope}):
        raise CheckpointError(f"{where}: rope_scaling and rope_parameters say different things: leave one of them out.")
    if any(said.get("partial_rotary_factor") not in (None, 1) for said in (config, rope)):
        raise CheckpointError(f"{where}: partial_rotary_factor is not supported for this kind of model.")
    kind = _type_of(rope)
    if kind == "default":
        return theta, None
    if kind not in _ROPE_TYPES:
        raise CheckpointError(
            f"{where}: rope_type {kind!r} is not supported; supported are: default, {', '.join(_ROPE_TYPES)}."
        )
    longest, name = whole(config, "max_position_embeddings", where), "original_max_position_embeddings"
    stated = next((said for said in (config, rope) if said.get(name)), None)  # as transformers ranks them
    original = longest if stated is None else whole(stated, name, where)
    if kind == "longrope":
        factor = positive(rope, "factor", where, longest / original)
        return theta, LongRopeScaling(
            short_factor=_factors(rope, "short_factor", where),
            long_factor=_factors(rope, "long_factor", where),
            original_max_position_embeddings=original,
            attention_factor=positive(rope, "attention_factor", where, longrope_attention_factor(factor, original)),
        )
    factor = positive(rope, "factor", where)
    if factor < 1:
        raise CheckpointError(f"{where}: the rope scaling's factor is {factor:g}: it must be at least 1.")
    match kind:
        case "linear":
            return theta, LinearRopeScaling(factor=factor)
        case "dynamic":
            return theta, DynamicRopeScaling(factor=factor)
        case "llama3":
            return theta, Llama3RopeScaling(
                factor=factor,
                low_freq_factor=positive(rope, "low_freq_factor", where),
                high_freq_factor=positive(rope, "high_freq_factor", where),
                original_max_position_embeddings=original,
            )
    scales = (positive(rope, name, where) if rope.get(name) else None for name in ("mscale", "mscale_all_dim"))
    return theta, YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=positive(rope, "attention_factor", where, yarn_attention_factor(factor, *scales)),
        beta_fast=positive(rope, "beta_fast", where, 32.0),
        beta_slow=positive(rope, "beta_slow", where, 1.0),
        truncate=flag(rope, "truncate", where, default=True),
    )


def parse_local_theta(config: Mapping[str, Any], where: str) -> float:
    """The rotary base of sliding layers: of `rope_parameters`, or `rope_local_base_freq`. Raises CheckpointError."""
    rope = _mapping(_mapping(config, "rope_parameters", where), "sliding_attention", where)
    if _type_of(rope) != "default":
        raise CheckpointError(f"{where}: rope_type {_type_of(rope)!r} is not supported for sliding_attention.")
    if "rope_theta" in rope:
        return positive(rope, "rope_theta", where)
    kind = _kind_of(config)
    return positive(
        config, "rope_local_base_freq", where, kind.local_theta or _theta({}, config, where, kind.rope_theta)
    )


def rope_json(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The inverse of parse_rope: `rope_parameters`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        rope |= {"rope_type": _ROPE_NAMES[type(scaling)], **asdict(scaling)}
    return rope


def _factors(rope: Mapping[str, Any], field: str, where: str) -> tuple[float, ...]:
    values = rope[field]
    if not isinstance(values, list | tuple):
        raise CheckpointError(f"{where}: {field} is {values!r}: it must be a list of numbers.")
    return tuple(positive({field: value}, field, where) for value in values)


def _kind_of(config: Mapping[str, Any]) -> Kind:
    return KINDS[config.get("model_type", "llama")]


def _theta(rope: Mapping[str, Any], config: Mapping[str, Any], where: str, default: float) -> float:
    said = rope if "rope_theta" in rope else config
    return positive(said, "rope_theta", where, None if "rope_theta" in said else default)


def _type_of(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _mapping(config: Mapping[str, Any], field: str, where: str) -> Mapping[str, Any]:
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {field} is {value!r}: it must be an object.")
    return value


def _says_no_more(scaling: Mapping[str, Any], rope: Mapping[str, Any]) -> bool:
    """Whether all that `rope_scaling` says stands in `rope_parameters`, too."""
    said, found = (
        {name: value for name, value in {**of, "rope_type": _type_of(of)}.items() if name != "type"}
        for of in (scaling, rope)
    )
    return said.items() <= found.items()
