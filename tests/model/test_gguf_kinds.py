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
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import CheckpointError, resolve_source
from hamburger.model.config import ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rope_scaling import LinearRopeScaling
from peer import as_its_kind_has_them
from small_models import CPU, one_sequence, random_tensors, trunk_config
from trunk_shapes import GEMMA3, QWEN3

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
    "gemma3": ("gemma3", GEMMA),
    "gemma3_untied": ("gemma3", {**GEMMA, "tie_word_embeddings": False}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(path: Path, kind: str, **changes: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A file with random weights in float32, by the library's own names; what is to be found in it."""
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
        for name, tensor in as_its_kind_has_them(config, tensors).items():
            # llama.cpp's converter adds the 1 of Gemma's norms.
            values = tensor + 1 if architecture == "gemma3" and "norm" in name else tensor
            theirs = names.get_name(name, (".weight", ".bias"))
            assert theirs is not None
            writer.add_tensor(theirs, values.numpy())
    return config, tensors


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
