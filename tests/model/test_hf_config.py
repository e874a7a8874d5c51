"""config.json of Llama models, as several versions of transformers write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from hamburger.model.config import Llama3RopeScaling
from hamburger.model.hf_config import parse_trunk_config, read_trunk_config, trunk_config_json
from hamburger.model.sources import CheckpointError
from small_models import trunk_config

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def config(**changes: Any) -> dict[str, Any]:
    fields = trunk_config_json(trunk_config())
    del fields["rope_parameters"]
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000, "rope_scaling": None}, 500000.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, None),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}}, 5e5, LLAMA3),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}, 5e5, LLAMA3),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}}, 5e5, LLAMA3),
    ],
)
def test_both_forms_of_rope(changes: dict[str, Any], theta: float, scaling: Llama3RopeScaling | None) -> None:
    trunk = parse_trunk_config(config(**changes), "here")
    assert (trunk.rope_theta, trunk.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen2"}, "qwen2.*supported are: llama"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn.*default, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": "llama3"}, "here"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": "many"}, "many"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_trunk_config(config(**changes), "here")


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_field_is_named(field: str) -> None:
    fields = config()
    del fields[field]
    with pytest.raises(CheckpointError, match=f"{field} is missing"):
        parse_trunk_config(fields, "here")


def test_defaults_follow_from_the_heads() -> None:
    trunk = parse_trunk_config(config(head_dim=None, num_key_value_heads=None, tie_word_embeddings=None), "here")
    assert (trunk.head_dim, trunk.num_kv_heads, trunk.tie_word_embeddings) == (8, 4, False)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, None, (2,)), ([2, 5], None, (2, 5)), (None, None, ()), (2, 7, (7,)), (2, [7, 8], (7, 8))],
)
def test_end_tokens(tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(eos_token_id=in_config)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation, "temperature": 0.6}))
    assert read_trunk_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("rope_scaling", [None, LLAMA3])
def test_round_trip_and_what_transformers_writes(tmp_path: Path, rope_scaling: Llama3RopeScaling | None) -> None:
    trunk = trunk_config(rope_scaling=rope_scaling, rope_theta=123456.0, rms_norm_eps=3e-6, eos_token_ids=(3, 4))
    written = trunk_config_json(trunk)
    assert parse_trunk_config(json.loads(json.dumps(written)), "here") == trunk
    LlamaConfig(**written).save_pretrained(tmp_path)
    assert read_trunk_config(tmp_path) == trunk
