"""Models that read images: transformers' logits and greedy answers for texts, of the language model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from hamburger.model.checkpoints.config.hf import parse_trunk_config, read_trunk_config
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import CheckpointError, resolve_source
from peer import SIZES, saved
from transformers_answers import assert_answers_are, served

TOWER = {"hidden_size": 32, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
PIXTRAL = {**TOWER, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}


def sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [*sizes]}}


MODELS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "model_type": "mistral3", "vision_config": PIXTRAL, "tie_word_embeddings": False,
        "text_config": {**SIZES, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
    },
    "mistral3_of_ministral3": {
        "model_type": "mistral3", "vision_config": PIXTRAL,
        "text_config": {**SIZES, "model_type": "ministral3", "head_dim": 16},
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl", "text_config": {**SIZES, **sections(1, 1, 2)}, "tie_word_embeddings": True,
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", "text_config": {**SIZES, **sections(1, 1, 2)},
        "vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl", "text_config": {**SIZES, "head_dim": 16, **sections(2, 3, 3)},
        "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_answers_are_transformers(tmp_path: Path, name: str) -> None:
    assert_answers_are(saved(tmp_path, AutoModelForImageTextToText, **MODELS[name]), served(tmp_path))


@pytest.mark.parametrize(
    ("name", "theirs", "newer"),
    [
        ("mistral3", "language_model.model.", "model.language_model."),
        ("qwen2_5_vl", "model.", "model.language_model."),
        ("qwen3_vl", "model.language_model.", "language_model.model."),
    ],
)
def test_names_of_every_transformers_are_read(tmp_path: Path, name: str, theirs: str, newer: str) -> None:
    saved(tmp_path, AutoModelForImageTextToText, **MODELS[name])
    wanted = load_checkpoint(resolve_source(str(tmp_path)), torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {newer + n.removeprefix(theirs) if n.startswith(theirs) else n: t for n, t in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    told: list[str] = []
    found = load_checkpoint(resolve_source(str(tmp_path)), torch.float32, on_progress=told.append)
    assert found.config == wanted.config
    assert found.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    assert [line.startswith("this model reads images, but its text part alone is served") for line in told] == [True]


def test_an_older_configuration_without_a_text_config_is_read(tmp_path: Path) -> None:
    """As of Qwen2.5-VL-3B-Instruct, whose fields stand beside vision_config."""
    saved(tmp_path, AutoModelForImageTextToText, **MODELS["qwen2_5_vl"])
    wanted = read_trunk_config(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    rope = {"rope_theta": 100.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    file.write_text(json.dumps({**text, **config, **rope}))
    assert read_trunk_config(tmp_path) == wanted


def test_a_ministral_3_is_served_as_far_as_its_queries_are_not_scaled() -> None:
    text = {**SIZES, "model_type": "ministral3", "max_position_embeddings": 262144, "rms_norm_eps": 1e-5}
    trunk = parse_trunk_config(text, "here")
    assert (trunk.context_tokens, trunk.fixed_context_tokens) == (16384, 16384)
    assert trunk.rope_scaling is not None
    unscaled = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    assert parse_trunk_config({**text, "rope_parameters": unscaled}, "here").context_tokens == 262144
    early = {**unscaled, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8192}
    assert parse_trunk_config({**text, "rope_parameters": early}, "here").context_tokens == 8192


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mistral3"}, "text_config, the language model of a mistral3, is missing"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
            "text_config is of a 'mistral4'; of mistral3 are supported: mistral, ministral3",
        ),
        (
            {"model_type": "qwen3_vl", "text_config": {**SIZES, "rms_norm_eps": 1e-5, "hidden_act": "gelu"}},
            "hidden_act",
        ),
    ],
)
def test_what_is_not_read_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_trunk_config(fields, "config.json")
