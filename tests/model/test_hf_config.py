"""config.json of every architecture, as several versions of transformers write it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from hamburger.model.checkpoints.config.hf import SUPPORTED, parse_trunk_config, read_trunk_config, trunk_config_json
from hamburger.model.checkpoints.config.unfit import why_unfit
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.rope_scaling import LinearRopeScaling, Llama3RopeScaling
from small_models import trunk_config
from trunk_shapes import LLAMA3, MIXTURES, SHAPES

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

# Fields that transformers always writes where there are experts.
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


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
        (
            {
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING},
                "rope_scaling": {"type": "llama3", **SCALING},
            },
            5e5,
            LLAMA3,
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "llama3", **SCALING, "original_max_position_embeddings": 7},
                "original_max_position_embeddings": SCALING["original_max_position_embeddings"],
            },
            5e5,
            LLAMA3,
        ),
        ({"partial_rotary_factor": None}, 10000.0, None),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7e4}}, 7e4, None),
        (
            {
                "rope_theta": 5e5,
                "rope_parameters": {"rope_type": "llama3", **SCALING},
                "rope_scaling": {"type": "llama3", "rope_theta": 5e5, **SCALING},
            },
            5e5,
            LLAMA3,
        ),
    ],
)
def test_both_forms_of_rope(changes: dict[str, Any], theta: float, scaling: Llama3RopeScaling | None) -> None:
    trunk = parse_trunk_config(config(**changes), "here")
    assert (trunk.rope_theta, trunk.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"model_type": "gemma2"},
            "gemma2.*caps on logits.; supported are: "
            "llama, mistral, qwen2, qwen3, ministral, smollm3, olmo2, olmo3, gemma, gemma3_text, exaone4, "
            "hyperclovax, glm, glm4, qwen3_moe, olmoe, mixtral, granite, granitemoe, granitemoehybrid, phi3, cwm, "
            "ministral3, internlm3, iquestcoder, seed_oss, ernie4_5, helium, gemma3, mistral3, "
            "qwen2_vl, qwen2_5_vl, qwen3_vl",
        ),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            "proportional.*default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3': it must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor is '4': it must be a number above 0"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "fast"}},
            "beta_fast is 'fast': it must be a number above 0",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 64.5}},
            "original_max_position_embeddings is 64.5: it must be a whole number",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": "no"}}, "truncate is 'no': .* true or false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True; for mistral only False"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
        (
            {"model_type": "qwen2", "attention_bias": None, "use_sliding_window": True, "layer_types": ["x"]},
            "layer_types",
        ),
        ({"model_type": "mistral", "attention_bias": None, "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"model_type": "gemma3"}, "text_config.*is missing"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "sliding_attention",
        ),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"model_type": "gemma3", "text_config": {}, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": 10**30}, r"num_hidden_layers is 10+: it must be a whole number in \[1, 10000\]"),
        ({"hidden_size": None}, "hidden_size is None: it must be a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small': it must be a number above 0"),
        ({"rope_theta": None}, "rope_theta is None: it must be a number above 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0: it must be a number above 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>': it must be a token id"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "yarn", "factor": 4},
            },
            "rope_scaling and rope_parameters say different things",
        ),
        (
            {
                "model_type": "mistral",
                "attention_bias": None,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types names full_attention",
        ),
        ({"model_type": "mistral", "attention_bias": None, "sliding_window": "8"}, "sliding_window is '8'"),
        (
            {"model_type": "qwen2", "attention_bias": None, "use_sliding_window": "false"},
            "use_sliding_window is 'false'",
        ),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false': it must be true or false"),
        ({"attention_bias": 1}, "attention_bias is 1: it must be true or false"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2': it must be a whole number"),
        ({"head_dim": 16.0}, "head_dim is 16.0: it must be a whole number"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
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
    [
        (2, None, (2,)), ([2, 5], None, (2, 5)), (None, None, ()), (2, 7, (7,)), (2, [7, 8], (7, 8)),
        (50279, None, ()), ([2, -1, 50279], None, (2,)),  # transformers' defaults, which are none of its tokens
    ],
)  # fmt: skip
def test_end_tokens(tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(eos_token_id=in_config)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation, "temperature": 0.6}))
    assert read_trunk_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("shape", [*SHAPES, *MIXTURES])
def test_round_trip_and_what_transformers_writes(tmp_path: Path, shape: str) -> None:
    trunk = trunk_config(
        **{"rope_theta": 123456.0, "rms_norm_eps": 3e-6, "eos_token_ids": (3, 4), **{**SHAPES, **MIXTURES}[shape]}
    )
    written = trunk_config_json(trunk)
    assert parse_trunk_config(json.loads(json.dumps(written)), "here") == trunk
    AutoConfig.for_model(**written).save_pretrained(tmp_path)
    assert read_trunk_config(tmp_path) == trunk


@pytest.mark.parametrize(
    "name", ["mistral", "qwen2", "qwen3", "smollm3", "olmo3", "gemma3_text", "qwen3_moe", "mixtral"]
)
@pytest.mark.parametrize("told", [{}, {"use_sliding_window": True, "max_window_layers": 3}, {"sliding_window": None},
                                  {"use_sliding_window": True, "sliding_window": 7}])  # fmt: skip
def test_what_a_config_leaves_out_is_transformers_default(name: str, told: dict[str, Any]) -> None:
    fields = {**config(), **EXPERTS, **told, "model_type": name}
    for field in ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings"):
        del fields[field]
    theirs: Any = AutoConfig.for_model(**fields)
    ours = parse_trunk_config(fields, "here")
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    ropes = theirs.rope_parameters
    assert ours.rope_theta == ropes.get("full_attention", ropes)["rope_theta"]
    if ours.local_rope_theta is not None:
        assert ours.local_rope_theta == ropes["sliding_attention"]["rope_theta"]
    assert ours.unturned_layers == tuple(
        i for i, turns in enumerate(getattr(theirs, "no_rope_layers", ())) if not turns
    )
    window = theirs.sliding_window
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 4)  # all, untyped
    sliding = () if window is None else tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    assert ours.sliding_layers == sliding
    assert ours.sliding_window == (window if sliding else None)


def test_gemma_with_images_leaves_the_published_ones_sizes_out() -> None:
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "sliding_window": 1024}
    theirs: Any = AutoConfig.for_model("gemma3", text_config=text).text_config
    ours = parse_trunk_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}, "here")
    assert ours == replace(parse_trunk_config(theirs.to_dict(), "here"), eos_token_ids=(1, 106))
    stretched = {
        "model_type": "gemma3",
        "text_config": {**text, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    }
    assert parse_trunk_config(stretched, "here").rope_scaling == LinearRopeScaling(factor=8.0)
    assert parse_trunk_config(stretched, "here").context_tokens == 131072


@pytest.mark.parametrize(("beside", "tied"), [({}, True), ({"tie_word_embeddings": False}, False)])
def test_whether_the_head_of_gemma_with_images_is_tied_stands_beside_its_text(beside: Any, tied: bool) -> None:
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": not tied}
    trunk = parse_trunk_config({"model_type": "gemma3", "text_config": text, **beside}, "here")
    assert trunk.tie_word_embeddings is tied


def test_rotary_bases_as_gemma_wrote_them_first() -> None:
    fields = {**config(), "model_type": "gemma3_text", "rope_theta": 7e5, "rope_local_base_freq": 3e4}
    fields |= {"sliding_window_pattern": 3, "sliding_window": 64, "num_hidden_layers": 7}
    ours, theirs = parse_trunk_config(fields, "here"), AutoConfig.for_model(**fields)
    assert (ours.rope_theta, ours.local_rope_theta, ours.sliding_layers) == (7e5, 3e4, (0, 1, 3, 4, 6))
    assert {name: rope["rope_theta"] for name, rope in theirs.rope_parameters.items()} == {
        "full_attention": 7e5,
        "sliding_attention": 3e4,
    }
    assert theirs.layer_types == [
        "sliding_attention" if i in ours.sliding_layers else "full_attention" for i in range(7)
    ]


def test_the_context_is_what_the_scaling_makes_of_it() -> None:
    tokens = {name: trunk_config(**shape).context_tokens for name, shape in SHAPES.items()}
    assert tokens["grouped"] == tokens["llama3_rope"] == 512
    assert tokens["linear_rope"] == 3 * 512
    assert tokens["dynamic_rope"] == tokens["yarn_rope"] == 256
    assert trunk_config(**SHAPES["dynamic_rope"]).fixed_context_tokens == 64


def test_a_kind_that_is_served_is_not_called_unfit() -> None:
    assert not [kind for kind in SUPPORTED if why_unfit(kind)]
    with pytest.raises(CheckpointError, match=r"model_type 'mamba9' is not supported; supported are: llama, "):
        parse_trunk_config(config(model_type="mamba9"), "here")
