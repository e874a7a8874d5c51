"""Kinds that are retold as another, Granite as a Llama: transformers' logits, whatever their configuration says."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.device.loras import LoraFolders
from hamburger.engine.types.messages import LoadLora
from hamburger.model.assemble import assemble
from hamburger.model.checkpoints.config.hf import parse_trunk_config, read_trunk_config
from hamburger.model.checkpoints.load import load_checkpoint, save_checkpoint
from hamburger.model.checkpoints.lora_folder import base_config, read_lora
from hamburger.model.checkpoints.sources import CheckpointError, resolve_source
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.rope_scaling import LongRopeScaling
from lora_folders import lora_folder, merged_by_peft, saved_adapter
from peer import SIZES, greedy, saved
from relatives import GRANITE4, KINDS, longrope
from small_models import CPU, core_of, params, run_core, tokens_of
from transformers_answers import assert_answers_are, served


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_answers_are_transformers(tmp_path: Path, kind: str) -> None:
    assert_answers_are(saved(tmp_path, **KINDS[kind]), served(tmp_path, packed=None))


@pytest.mark.parametrize("kind", [KINDS["granite"], {"model_type": "gemma3_text"}], ids=["granite", "gemma3"])
def test_bfloat16_weights_lose_little_by_their_factors(tmp_path: Path, kind: dict[str, Any]) -> None:
    made = saved(tmp_path, **kind)
    made.bfloat16().save_pretrained(tmp_path)
    exact = load_checkpoint(resolve_source(str(tmp_path)), torch.float32).tensors
    rounded = load_checkpoint(resolve_source(str(tmp_path)), torch.bfloat16).tensors
    for name, tensor in exact.items():
        torch.testing.assert_close(rounded[name].float(), tensor, rtol=2**-8, atol=0)


QKV = ["q_proj", "k_proj", "v_proj"]
JOINED = ["o_proj", "gate_up_proj", "down_proj"]
LORA_TARGETS = {
    "phi3": ["qkv_proj", *JOINED],
    "phi4_mini": ["qkv_proj", *JOINED],
    "glm": [*QKV, *JOINED],
    "glm4": [*QKV, *JOINED],
    "granitemoe": [*QKV, "o_proj"],
    "granite4": [*QKV, "o_proj", "input_linear", "output_linear"],
}


@pytest.mark.parametrize(
    "kind",
    [KINDS["granite"], KINDS["granite_without_factors"], KINDS["phi3_tied"], {"model_type": "gemma3_text"}],
    ids=["granite", "granite without factors", "phi3", "gemma3"],
)
def test_a_head_that_was_trained_on_its_own_is_not_left_out(tmp_path: Path, kind: dict[str, Any]) -> None:
    saved(tmp_path, **{**kind, "tie_word_embeddings": True})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    load_checkpoint(resolve_source(str(tmp_path)), torch.float32)  # the embedding once more
    tensors["lm_head.weight"][0, 0] += 1.0
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"^[^:]*: lm_head.weight differs .* set tie_word_embeddings to false"):
        load_checkpoint(resolve_source(str(tmp_path)), torch.float32)


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, **KINDS["phi3"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(CheckpointError, match="weights are not those of its configuration"):
        load_checkpoint(resolve_source(str(tmp_path)), torch.float32)
    saved(tmp_path, **KINDS["granite"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "residual_multiplier": "much"}))
    with pytest.raises(CheckpointError, match="much"):
        load_checkpoint(resolve_source(str(tmp_path)), torch.float32)


def phi3_config(**changes: Any) -> dict[str, Any]:
    return {**SIZES, "model_type": "phi3", "rms_norm_eps": 1e-5, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {**longrope(4), "long_factor": [1.0] * 3}}, "long_factor has 3 numbers, but 4 wavelengths"),
        ({"rope_scaling": {**longrope(4), "short_factor": None}}, "short_factor is None"),
        ({"rope_scaling": {**longrope(4), "short_factor": [1.0, 1.0, 1.0, 0]}}, "short_factor is 0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "long_factor is missing"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        ({"partial_rotary_factor": 2.0}, "rotary_dim is 16"),
        ({"partial_rotary_factor": 0.4}, "rotary_dim is 3"),
    ],
)
def test_what_a_phi_cannot_turn_by_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(phi3_config(**changes)))
    with pytest.raises(CheckpointError, match=message):
        read_trunk_config(tmp_path)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_older_names_of_longrope_are_read(name: str) -> None:
    """As of Phi-3-mini-128k-instruct, whose factor and attention factor follow from its two contexts."""
    rope = {"type": name, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = phi3_config(original_max_position_embeddings=4096, max_position_embeddings=131072, rope_scaling=rope)
    found = parse_trunk_config(config, "config.json").rope_scaling
    assert isinstance(found, LongRopeScaling)
    assert found.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_in_our_own_format_it_is_the_same_model(tmp_path: Path, kind: str) -> None:
    """Whose weights are retold already."""
    saved(tmp_path, **KINDS[kind])
    wanted = load_checkpoint(resolve_source(str(tmp_path)), torch.float32)
    save_checkpoint(tmp_path / "own", wanted.config, wanted.tensors)
    found = load_checkpoint(resolve_source(str(tmp_path / "own")), torch.float32)
    assert found.config == wanted.config
    assert found.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in wanted.tensors.items())


@pytest.mark.parametrize(
    "kind",
    [
        "granite",
        "granite_with_biases",
        "granitemoe",
        "granite4",
        "hyperclovax",
        "internlm3_with_biases",
        "phi3",
        "phi4_mini",
        "seed_oss",
        "ernie4_5",
        "helium_with_biases",
        "glm",
        "glm4",
        "smollm3",
        "olmo2",
        "exaone4",
        "gemma",
        "gemma3_text",
    ],
)
def test_lora_adapters_of_every_kind_are_served(tmp_path: Path, kind: str) -> None:
    """Retold as the weights are; kinds that are read as they are have nothing to retell."""
    peer = saved(tmp_path, **KINDS.get(kind, {"model_type": kind}))
    targets: Any = LORA_TARGETS.get(kind, "all-linear")
    folder = saved_adapter(tmp_path / "adapter", peer, 1, r=4, lora_alpha=6, target_modules=targets)
    source = resolve_source(str(tmp_path))
    checkpoint = load_checkpoint(source, torch.float32)
    model = assemble(checkpoint.config, checkpoint.tensors, dtype=torch.float32, device=CPU, max_positions=256)
    core = core_of(model)
    assert model.loras is not None
    core._loras = CoreLoras(LoraFolders(model.loras, checkpoint.config.trunk, 4, source), 1)
    assert core.load_lora(LoadLora(1, str(folder))) is None
    prompt = torch.randint(3, 96, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = params(prompt_logprobs=0, max_tokens=16, ignore_eos=True)
    [first, *rest] = run_core(core, {"r": (prompt, asked)}, loras={"r": 1})["r"]
    merged = merged_by_peft(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), folder)
    with torch.inference_mode():
        wanted = merged(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    found = [entry.logprob for entry in first.prompt_logprobs or [] if entry is not None]
    assert found == pytest.approx(wanted.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), abs=1e-4)
    assert tokens_of([first, *rest]) == greedy(merged, prompt, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "seed_oss", "attention_bias": False, "attention_out_bias": True}, "attention_out_bias without"),
        ({"model_type": "seed_oss", "mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "ernie4_5", "use_bias": "no"}, "use_bias is 'no'"),
        ({"model_type": "helium", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "granitemoe", "num_local_experts": 4, "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "internlm3", "qkv_bias": True}, "qkv_bias is True and bias False; only the same"),
        ({"model_type": "iquestcoder", "clip_qkv": 8}, "clip_qkv is 8"),
        ({"model_type": "hyperclovax", "use_post_norm": False}, "use_post_norm is False; only True"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act is 'silu'; only 'gelu_pytorch_tanh'"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({**GRANITE4, "num_local_experts": 8}, "num_local_experts is 8: of granitemoehybrid those without experts"),
        ({**GRANITE4, "layer_types": ["mamba", "attention", "mamba"]}, "layer_types names mamba, but only layers of"),
        ({**GRANITE4, "layer_types": None}, "layer_types names mamba"),
        ({**GRANITE4, "position_embedding_type": "nope"}, "position_embedding_type is 'nope'; only 'rope'"),
        ({**GRANITE4, "shared_intermediate_size": 0}, "shared_intermediate_size is 0"),
    ],
)
def test_what_a_kind_cannot_be_retold_with_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_trunk_config({**SIZES, "rms_norm_eps": 1e-5, **fields}, "config.json")


NONSENSE: list[Any] = ["x", [], {}, {"a": []}, 0, -1, 1.5, 10**30, math.nan, True, None]


@pytest.mark.parametrize("kind", [*KINDS, "ministral3"])
def test_nonsense_is_told_as_nonsense(kind: str) -> None:
    """A field at a time: it is read or refused, and nothing else is raised."""
    fields: dict[str, Any] = {**SIZES, "rms_norm_eps": 1e-5, **KINDS.get(kind, {"model_type": kind})}
    rope = {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}
    asked = [{**fields, name: value} for name in fields for value in NONSENSE]
    asked += [{other: fields[other] for other in fields if other != name} for name in fields]
    asked += [{**fields, "rope_parameters": {**rope, name: value}} for name in rope for value in NONSENSE]
    if kind == "ministral3":
        asked += [{"model_type": "mistral3", "text_config": {**fields, "model_type": value}} for value in NONSENSE]
    for config in asked:
        with contextlib.suppress(CheckpointError, ConfigError):
            parse_trunk_config(config, "config.json")


LEFT_OUT = ["internlm3", "iquestcoder", "hyperclovax", "gemma", "seed_oss", "ernie4_5", "helium", "glm", "glm4"]


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_a_relative_leaves_out_is_transformers_default(kind: str) -> None:
    fields: dict[str, Any] = {**SIZES, "model_type": kind, "rms_norm_eps": 1e-5}
    theirs: Any = AutoConfig.for_model(**fields)
    ours = parse_trunk_config(fields, "here")
    assert ours.head_dim == theirs.head_dim
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    part = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert ours.rotary_dim == (None if part == 1 else int(theirs.head_dim * part))
    has_bias = getattr(theirs, "use_bias", None)
    assert ours.qkv_bias == (getattr(theirs, "attention_bias", False) if has_bias is None else has_bias)


def test_joined_adapters_of_another_width_are_refused(tmp_path: Path) -> None:
    peer = saved(tmp_path, **KINDS["phi3"])
    folder = saved_adapter(tmp_path / "adapter", peer, 1, r=4, target_modules=["qkv_proj"])
    trunk = read_trunk_config(tmp_path)
    with pytest.raises(CheckpointError, match="the weights are not those of its configuration"):
        read_lora(folder, trunk, 4, {**KINDS["phi3"], **SIZES, "num_attention_heads": 2, "head_dim": 8})
    with pytest.raises(CheckpointError, match=r"self_attn.qkv_proj is of no linear of this model's 3 layers"):
        read_lora(folder, trunk, 4)


def test_an_adapter_of_a_tied_head_is_refused_and_not_left_out(tmp_path: Path) -> None:
    """The head itself is left out where Granite's weights are retold."""
    saved(tmp_path, **KINDS["granite"])
    trunk = read_trunk_config(tmp_path)
    folder = lora_folder(tmp_path / "adapter", ModelConfig(trunk=trunk), 1, 4)
    file = folder / "adapter_model.safetensors"
    head = {f"base_model.model.lm_head.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
    save_file({**load_file(file), **head}, file)
    with pytest.raises(CheckpointError, match=r"lm_head.lora_A.weight is of no linear"):
        read_lora(folder, trunk, 4, base_config(resolve_source(str(tmp_path))))
