"""A start makes a checkpoint's tensors one at a time, where they are not served as the file has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import assert_equal, edit_config, load, save_hf
from hamburger.model.assemble import assemble
from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.checkpoints.experts import one_by_one
from hamburger.model.checkpoints.lazy_tensors import Lazy, LazyTensors, entries_of
from hamburger.model.checkpoints.load import open_checkpoint
from hamburger.model.checkpoints.relatives.retelling import retold_tensors
from hamburger.model.checkpoints.sources import CheckpointError, resolve_source
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import Kernels, load_kernels
from hamburger.model.cpu.weights import PackedWeight
from hamburger.model.execution import Execution
from hamburger.model.tensor_shapes import JOINED, tensor_shapes
from native_models import WIDE
from small_models import CPU, graft_config, random_tensors, trunk_config
from trunk_shapes import GEMMA3, MIXTRAL

CONFIG = ModelConfig(trunk=trunk_config(**WIDE, num_heads=2), graft=graft_config(groups="verified"))


def lazy(tensors: dict[str, Tensor], on_made: Callable[[str], None]) -> LazyTensors:
    def make(name: str) -> Tensor:
        on_made(name)
        return tensors[name]

    return LazyTensors({name: Lazy(tuple(t.shape), t.dtype, partial(make, name)) for name, t in tensors.items()})


def test_what_is_not_asked_for_is_not_made() -> None:
    made: list[str] = []
    tensors = {name: torch.full((2,), float(n)) for n, name in enumerate("abc")}
    found = lazy(tensors, made.append) | {"d": torch.ones(2)}
    kept = found.without({"b"})
    assert list(kept) == ["a", "c", "d"]
    assert "b" not in kept
    assert {name: tuple(about.shape) for name, about in entries_of(kept).items()} == dict.fromkeys("acd", (2,))
    assert made == []
    assert torch.equal(kept["c"], tensors["c"])
    assert made == ["c"]


@pytest.mark.parametrize("kind", ["granite", "phi3", "ernie4_5", "helium", "gemma3_text", "gemma3", "mixtral"])
def test_models_in_other_words_are_made_no_earlier(kind: str) -> None:
    """Their names, cuts and factors concern tensors that are not there yet."""
    trunk = trunk_config(**(MIXTRAL if kind == "mixtral" else GEMMA3 if "gemma" in kind else {}))
    config: dict[str, Any] = {**trunk_config_json(trunk), "model_type": kind, "embedding_multiplier": 3.0}
    tensors = random_tensors(ModelConfig(trunk=trunk))
    if kind == "phi3":
        joined = {"self_attn.qkv_proj": JOINED["qkv"], "mlp.gate_up_proj": JOINED["gate_up"]}
        for layer in range(trunk.num_layers):
            for name, parts in joined.items():
                own = [tensors.pop(f"model.layers.{layer}.{part}.weight") for part in parts]
                tensors[f"model.layers.{layer}.{name}.weight"] = torch.cat(own)
    elif kind == "gemma3":
        config = {"model_type": kind, "text_config": config | {"model_type": "gemma3_text"}}
        tensors = {f"language_model.{name}": t for name, t in tensors.items()} | {"vision_tower.x": torch.ones(1)}
    elif kind == "mixtral":
        names = {"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts": "block_sparse_moe.experts"}
        names |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        for ours, theirs in names.items():
            tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    made: list[str] = []
    found = one_by_one(trunk, retold_tensors(config, lazy(tensors, made.append), "it"))
    shapes = {name: tuple(entry.shape) for name, entry in entries_of(found).items()}
    assert made == []
    assert {name: tuple(t.shape) for name, t in found.items()} == shapes == tensor_shapes(ModelConfig(trunk=trunk))
    assert set(made) == {name for name in tensors if not name.startswith("vision")}


def test_a_folder_of_another_dtype_is_converted_when_it_is_asked_for(tmp_path: Path) -> None:
    config = ModelConfig(trunk=CONFIG.trunk)
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()}
    source = resolve_source(str(save_hf(tmp_path / "small", config, tensors)))
    found = open_checkpoint(source, torch.float32).tensors
    assert all(isinstance(about, Lazy) and about.dtype == torch.float32 for about in found.entries.values())
    assert_equal(dict(found), load(tmp_path / "small").tensors)


def test_numbers_that_are_not_finite_are_named_when_they_are_asked_for(tmp_path: Path) -> None:
    config = ModelConfig(trunk=CONFIG.trunk)
    tensors = random_tensors(config)
    tensors["model.norm.weight"][3] = float("inf")
    folder = save_hf(tmp_path / "small", config, tensors)
    edit_config(folder, model_type="llama")
    found = open_checkpoint(resolve_source(str(folder)), torch.float32).tensors
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds numbers that are not finite"):
        found["model.norm.weight"]


def test_the_kernels_have_a_layer_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("the kernels do not run here")
    events: list[str] = []
    init = PackedWeight.__init__

    def packing(self: PackedWeight, kernels: Kernels, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        events.append("packed")
        init(self, kernels, weight, bias, bits)

    monkeypatch.setattr(PackedWeight, "__init__", packing)
    tensors = random_tensors(CONFIG)
    assemble(
        CONFIG, lazy(tensors, events.append), dtype=torch.float32, device=CPU, max_positions=100,
        execution=Execution(kernels=kernels),
    )  # fmt: skip
    made = [event for event in events if event != "packed"]
    assert sorted(made) == sorted(tensors)  # each once
    layers = [f"model.layers.{n}." for n in range(CONFIG.trunk.num_layers)]
    order = ["packed" if event == "packed" else event[: len(layers[0])] for event in events]
    order = [event for n, event in enumerate(order) if event in (*layers, "packed") and order[n - 1 : n] != [event]]
    expected = [event for layer in layers for event in (layer, "packed")]
    assert order == expected
