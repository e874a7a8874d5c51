"""GGUF files of kinds beside Llama: transformers, which reads them too, finds the same logits in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gguf_files import gguf_file
from hamburger.model.assemble import assemble
from hamburger.model.batch import Reads
from hamburger.model.checkpoints.four_bits import four_bit_linears
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import CheckpointError, resolve_source
from hamburger.model.config import ExpertsConfig, ModelConfig
from hamburger.model.cpu.weights import has_4_bits
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rope_scaling import LinearRopeScaling
from peer import as_its_kind_has_them
from quantised import norm_error
from small_models import CPU, one_sequence, random_tensors, trunk_config
from trunk_shapes import GEMMA3, QWEN3, QWEN3_MOE

Q4_0 = gguf.GGMLQuantizationType.Q4_0
IDS = torch.randint(2, 96, (60,), generator=torch.Generator().manual_seed(1)).tolist()
# transformers reads neither a Qwen's head_dim nor Gemma's scale of attention: both are those of the published models.
GEMMA: dict[str, Any] = {
    **GEMMA3,
    "head_dim": 256,
    "sliding_layers": (0, 1, 2, 3),
    "local_rope_theta": 10000.0,
    "rope_theta": 1e6,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"architecture": "qwen2", "qkv_bias": True, "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {**QWEN3, "head_dim": 128}),
    "qwen3moe": (
        "qwen3moe",
        {
            **QWEN3_MOE,
            "head_dim": 128,
            "experts": ExpertsConfig(number=5, per_token=2, width=768, sum_to_one=True),
        },
    ),
    "gemma3": ("gemma3", GEMMA),
    "gemma3_untied": ("gemma3", {**GEMMA, "tie_word_embeddings": False}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(path: Path, kind: str, in_4_bits: str = "none", **changes: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A file with random weights in float32, by the library's own names; what is to be found in it.

    in_4_bits: part of the names of those that are in Q4_0.
    """
    architecture, fields = KINDS[kind]
    config = ModelConfig(trunk=trunk_config(**{"num_layers": 4, **fields, **changes}))
    trunk, tensors = config.trunk, random_tensors(config, seed=2)
    with gguf_file(path, architecture, trunk) as writer:
        writer.add_value_length(trunk.head_dim)
        writer.add_vocab_size(trunk.vocab_size)
        if trunk.sliding_window is not None:
            writer.add_sliding_window(trunk.sliding_window)
        if trunk.local_rope_theta not in (None, 1e4):
            writer.add_rope_freq_base_swa(trunk.local_rope_theta)
            writer.add_sliding_window_pattern(1 + min({*range(trunk.num_layers)} - {*trunk.sliding_layers}))
        if trunk.rope_scaling is not None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(3.0)
        names = gguf.get_tensor_name_map(
            {n: k for k, n in gguf.MODEL_ARCH_NAMES.items()}[architecture], trunk.num_layers
        )
        if trunk.experts is not None:
            writer.add_expert_count(trunk.experts.number)
            writer.add_expert_used_count(trunk.experts.per_token)
            writer.add_expert_feed_forward_length(trunk.experts.width)
        as_written = as_its_kind_has_them if trunk.experts is None else of_all_experts
        for name, tensor in as_written(config, tensors).items():
            # llama.cpp's converter adds the 1 of Gemma's norms.
            values = tensor + 1 if architecture == "gemma3" and "norm" in name else tensor
            theirs = names.get_name(name, (".weight", ".bias"))
            assert theirs is not None
            if in_4_bits in name:
                writer.add_tensor(theirs, gguf.quants.quantize(values.numpy(), Q4_0), raw_dtype=Q4_0)
            else:
                writer.add_tensor(theirs, values.numpy())
    return config, tensors


def of_all_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As llama.cpp's converter joins them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    mixture = config.trunk.experts
    assert mixture is not None
    for name in tensors:
        if ".experts.0." in name:
            each = [tensors[name.replace(".experts.0.", f".experts.{n}.")] for n in range(mixture.number)]
            found[name.replace(".experts.0.", ".experts.")] = torch.stack(each)
    return found


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_on_the_same_file(tmp_path: Path, kind: str) -> None:
    config, tensors = written(tmp_path / "small.gguf", kind)
    loaded = load_checkpoint(resolve_source(str(tmp_path / "small.gguf")), torch.float32)
    assert loaded.config == config
    close(loaded.tensors, tensors)
    model = assemble(loaded.config, loaded.tensors, dtype=torch.float32, device=CPU, max_positions=512)
    batch = one_sequence([[i] for i in IDS], list(range(len(IDS))), emit=list(range(len(IDS))))
    cache = PagedKVCache(loaded.config.trunk, 1, len(IDS), torch.float32, CPU)
    peer: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="small.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        ours = model.backend.head(model.backend.trunk(batch, cache, Reads(batch.emit, 0))[0])
        theirs = peer.eval()(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_experts_of_4_bits_keep_them(tmp_path: Path) -> None:
    config, tensors = written(tmp_path / "small.gguf", "qwen3moe", in_4_bits=".experts.")
    source = resolve_source(str(tmp_path / "small.gguf"))
    of_experts = {name for name in tensors if ".experts." in name}
    assert four_bit_linears(source, config.trunk) == of_experts
    loaded = load_checkpoint(source, torch.float32)
    for name in of_experts:
        assert has_4_bits(loaded.tensors[name])
        assert norm_error(loaded.tensors[name], tensors[name]) < 0.1


def test_what_transformers_does_not_read_of_gemma(tmp_path: Path) -> None:
    """The larger ones' linear scaling; the largest's scale of attention, which llama.cpp tells by its layers."""
    stretched, tensors = written(tmp_path / "4b.gguf", "gemma3", rope_scaling=LinearRopeScaling(factor=3.0))
    loaded = load_checkpoint(resolve_source(str(tmp_path / "4b.gguf")), torch.float32)
    assert loaded.config == stretched
    close(loaded.tensors, tensors)
    layers = tuple(i for i in range(62) if (i + 1) % 6)
    largest, tensors = written(tmp_path / "27b.gguf", "gemma3", num_layers=62, sliding_layers=layers)
    loaded = load_checkpoint(resolve_source(str(tmp_path / "27b.gguf")), torch.float32)
    assert loaded.config == largest
    scale = (256 / (32 / 4)) ** 0.5  # a head has 256 dimensions, a share of the width 8
    close(loaded.tensors, {n: t * scale if n.endswith("q_norm.weight") else t for n, t in tensors.items()})


def test_the_rotary_base_and_the_places_of_gemmas_windows_may_be_told(tmp_path: Path) -> None:
    told, _ = written(tmp_path / "own.gguf", "gemma3", local_rope_theta=500.0, sliding_layers=(0, 1, 3))
    assert load_checkpoint(resolve_source(str(tmp_path / "own.gguf")), torch.float32).config == told


def test_a_scaling_of_others_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "small.gguf", "qwen3", rope_scaling=LinearRopeScaling(factor=3.0))
    with pytest.raises(CheckpointError, match=r"qwen3\.rope\.scaling\.type is 'linear'"):
        load_checkpoint(resolve_source(str(tmp_path / "small.gguf")), torch.float32)
