"""Kinds of models that transformers saves, by their own configurations: its logits, and its greedy answers whatever
serves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from hamburger.model.assemble import assemble
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from peer import SIZES, greedy, saved
from small_models import CPU, core_of, params, run_core, tokens_of
from transformers_answers import PROMPT, assert_answers_are, served
from verified import free_rows

GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "sliding_window": 12, "sliding_window_pattern": 2}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "smollm3_untied": {"model_type": "smollm3", "no_rope_layers": [0, 1, 1], "tie_word_embeddings": False},
    "ministral": {"model_type": "ministral", "sliding_window": 12, "head_dim": 8},
    "ministral_alternating": {
        "model_type": "ministral",
        "sliding_window": 12,
        "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "ministral_without_window": {
        "model_type": "ministral",
        "head_dim": 8,
        "layer_types": ["full_attention"] * 3,
        "tie_word_embeddings": True,
    },
    "ministral3": {"model_type": "ministral3", "head_dim": 16},
    "cwm": {"model_type": "cwm", "head_dim": 16, "sliding_window": 12},
    "olmo2": {"model_type": "olmo2"},
    "olmo2_as_many_kv_heads": {"model_type": "olmo2", "num_key_value_heads": 4, "attention_bias": True},
    "olmo3": {"model_type": "olmo3", "sliding_window": 12},
    "exaone4": {"model_type": "exaone4", "sliding_window": 12, "sliding_window_pattern": 2},
    "exaone4_without_window": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "exaone4_never_turned": {
        "model_type": "exaone4",
        "sliding_window": 12,
        "layer_types": ["full_attention"] * 3,
    },
    "qwen3moe": {"model_type": "qwen3_moe", **EXPERTS},
    "qwen3moe_some_dense": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "norm_topk_prob": True,
        "attention_bias": True,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 12,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
    "olmoe_with_biases": {
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "attention_bias": True,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5},
    "mixtral_sliding": {"model_type": "mixtral", "sliding_window": 12, "router_jitter_noise": 0.1},
    "gemma3": {**GEMMA3, "query_pre_attn_scalar": 24, "head_dim": 16},
    "gemma3_untied": {**GEMMA3, "tie_word_embeddings": False, "head_dim": 16, "attention_bias": True},
    "gemma3_stretched": {
        **GEMMA3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_answers_are_transformers(tmp_path: Path, kind: str) -> None:
    assert_answers_are(saved(tmp_path, **KINDS[kind]), served(tmp_path))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "_" not in kind])
def test_drafts_and_cached_prefixes_change_no_token(tmp_path: Path, kind: str) -> None:
    """Drafts of which one in seven is wrong; prompts that begin alike, in chunks of 16 slots."""
    peer = saved(tmp_path, **KINDS[kind])
    core = core_of(served(tmp_path), policy=free_rows(4), prefix_cache=True, max_num_seqs=2, max_num_batched_slots=16)
    for tail, cached in (([7], 0), ([9, 11], 80)):
        prompt = [*PROMPT, *PROMPT, *tail]
        wanted = greedy(peer, prompt, 24)
        predicted = tuple(token if i % 7 else 5 for i, token in enumerate(wanted))
        asked = params(max_tokens=24, ignore_eos=True, confidence=0.0, prediction_ids=predicted)
        outputs = run_core(core, {"r": (prompt, asked)})["r"]
        assert tokens_of(outputs) == wanted
        assert outputs[0].cached_slots == cached
        assert any(output.drafts for output in outputs)


@pytest.mark.parametrize("newer", [False, True])
def test_of_a_gemma_with_images_the_text_part_is_served(tmp_path: Path, newer: bool) -> None:
    ids = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 4}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    peer = saved(
        tmp_path, AutoModelForImageTextToText, model_type="gemma3",
        text_config={**SIZES, **GEMMA3, "head_dim": 16}, vision_config={**vision, "image_size": 28, "patch_size": 14},
        **ids,
    )  # fmt: skip
    if newer:  # names of a later transformers
        tensors = load_file(tmp_path / "model.safetensors")
        renamed = {name.replace("language_model.model.", "model.language_model."): t for name, t in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, tmp_path / "model.safetensors")
    told: list[str] = []
    checkpoint = load_checkpoint(resolve_source(str(tmp_path)), torch.float32, on_progress=told.append)
    model = assemble(checkpoint.config, checkpoint.tensors, dtype=torch.float32, device=CPU, max_positions=256)
    outputs = run_core(core_of(model), {"r": (PROMPT, params(max_tokens=24, ignore_eos=True))})["r"]
    assert tokens_of(outputs) == greedy(peer, PROMPT, 24)
    assert [line.startswith("this model reads images, but its text part alone is served") for line in told] == [True]
