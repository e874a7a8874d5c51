"""What a LoRA adapter's folder may hold, what becomes of it, and what is refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hamburger.engine.core.pool import lora_bytes
from hamburger.engine.device.loras import LoraFolders
from hamburger.model.backend import TorchLoras
from hamburger.model.checkpoints.lora_folder import read_lora
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ExpertsConfig, ModelConfig
from hamburger.model.tensor_shapes import JOINED
from lora_folders import lora_folder
from native_models import WIDE
from small_models import trunk_config

WIDE_BASE = ModelConfig(trunk=trunk_config(**WIDE))
WITH_IMAGES = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 64}}


def test_joined_linears_keep_their_parts_apart(tmp_path: Path) -> None:
    folder = lora_folder(tmp_path, WIDE_BASE, 3, 5, ("q_proj", "v_proj", "up_proj"), lora_alpha=20)
    weights, tensors = read_lora(folder, WIDE_BASE.trunk, 5), load_file(folder / "adapter_model.safetensors")
    start = "base_model.model.model.layers.2."
    down, up = weights.joined(WIDE_BASE.trunk, 2, "qkv") or pytest.fail("there is one")
    assert (down.shape, up.shape) == ((10, 64), (256, 10))
    for at, name in ((slice(128), "q"), (slice(192, 256), "v")):
        pair = [tensors[f"{start}self_attn.{name}_proj.lora_{side}.weight"] for side in "BA"]
        torch.testing.assert_close((up @ down)[at], 4 * pair[0] @ pair[1])
    assert not (up @ down)[128:192].any()
    assert weights.joined(WIDE_BASE.trunk, 2, "o") is None
    assert weights.joined(WIDE_BASE.trunk, 2, "down") is None


def test_memory_is_kept_for_adapters_of_all_linears(tmp_path: Path) -> None:
    trunk = WIDE_BASE.trunk
    weights = read_lora(lora_folder(tmp_path, WIDE_BASE, 3, 6), trunk, 6)
    pairs = [weights.joined(trunk, layer, name) or pytest.fail("there is one") for layer in range(4) for name in JOINED]
    assert lora_bytes(trunk, 6, 2) == 2 * sum(tensor.numel() for pair in pairs for tensor in pair)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3', but only LORA"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only', but adapters with biases are not served"),
    "dora": ({"use_dora": True}, "use_dora is True, which is not served"),
    "saved": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which is not served"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changed the base's weights"),
    "what is not known yet": ({"use_next_thing": {"a": 1}}, "use_next_thing is {'a': 1}, which is not served"),
    "alpha": ({"lora_alpha": None}, "give no number for model.layers.0.mlp.down_proj"),
    "pattern": ({"alpha_pattern": {"[": 2}}, "alpha_pattern of adapter_config.json give no number"),
    "too great a number": ({"rank_pattern": {"a{99999999999999}": 2}}, "rank_pattern of adapter_config.json give no"),
    "too many repeats": (
        {"rank_pattern": {f"a{i}.*.*": 2 for i in range(201)}},
        "alpha_pattern and rank_pattern have 402 repeats, but at most 400 are read",
    ),
    "too many patterns": (
        {"rank_pattern": {f"a{i}": 2 for i in range(2001)}},
        "rank_pattern has 2,001 patterns, but at most 2,000 are read",
    ),
    "half a group": ({"alpha_pattern": {"(": 2}}, "is not read: a pattern may have"),
    "slow pattern": (
        {"alpha_pattern": {"(a+)+b|(.*.*.*)*x": 2}},
        "is not read: a pattern may have 2000 characters",
    ),
    "repeated group": (
        {"alpha_pattern": {"(a|aa){1,9}": 2}},
        "is not read: a pattern may have 2000 characters",
    ),
    "many groups": ({"alpha_pattern": {"(.|.)" * 18 + "!": 2}}, "is not read: a pattern may have 2000 characters"),
    "many repeats": ({"alpha_pattern": {".?" * 24 + "!": 2}}, "is not read: a pattern may have 2000 characters"),
    "long pattern": ({"alpha_pattern": {"a|" * 1001: 2}}, "is not read: a pattern may have 2000 characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_of_other_kinds_are_refused_by_name(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        read_lora(lora_folder(tmp_path, WIDE_BASE, 1, **changes), WIDE_BASE.trunk, 64)


TENSORS: dict[str, tuple[str, torch.Tensor | None, str]] = {
    "another linear": ("layers.0.mlp.router.lora_A", torch.zeros(8, 64), "layers.0.mlp.router is of no linear of"),
    "another layer": (
        "layers.4.mlp.up_proj.lora_A",
        torch.zeros(8, 64),
        "layers.4.* is of no linear of this model's 4 layers",
    ),
    "a layer of many digits": (f"layers.{'9' * 4400}.mlp.up_proj.lora_A", torch.zeros(8, 64), "is of no linear of"),
    "a layer by another name": ("layers.01.mlp.up_proj.lora_A", torch.zeros(8, 64), "is of no linear of"),
    "a long name": (f"layers.0.mlp.{'a' * 60}.lora_A", torch.zeros(8, 64), "is of no linear of"),
    "a head": ("lm_head.lora_A", torch.zeros(8, 64), "lm_head.lora_A.weight is of no linear"),
    "half a pair": ("layers.3.mlp.up_proj.lora_B", None, "layers.3.mlp.up_proj has only one of lora_A and lora_B"),
    "another width": (
        "layers.1.mlp.up_proj.lora_A",
        torch.zeros(8, 32),
        r"is \[96, 64\]: the adapter is of another model",
    ),
    "a width of no linear": (
        "layers.1.mlp.up_proj.lora_A",
        torch.zeros(8, 10_000),
        r"\[8, 10000\], wider than any linear of this model \(256\): the adapter is of another model",
    ),
    "another rank": (
        "layers.1.mlp.up_proj.lora_A",
        torch.zeros(4, 64),
        r"is \[96, 64\]: the adapter is of another model",
    ),
    "no matrix": ("layers.1.mlp.up_proj.lora_A", torch.tensor(1.0), r"up_proj.lora_A.weight is float32 \[\], but"),
    "whole numbers": ("layers.1.mlp.up_proj.lora_A", torch.ones(8, 64, dtype=torch.int8), r"is int8 \[8, 64\], but"),
    "not a number": ("layers.1.mlp.up_proj.lora_A", torch.full((8, 64), torch.nan), "numbers that are not finite"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str) -> None:
    folder = lora_folder(tmp_path, WIDE_BASE, 1)
    short, tensor, message = TENSORS[name]
    file = folder / "adapter_model.safetensors"
    tensors, key = load_file(file), f"base_model.model.model.{short}.weight"
    tensors.pop(key, None)
    if tensor is not None:
        tensors[key] = tensor
        tensors.setdefault(key.replace("lora_A", "lora_B"), torch.zeros(96, 8))
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        read_lora(folder, WIDE_BASE.trunk, 64)


def test_a_file_that_is_cut_afterwards_harms_nobody(tmp_path: Path) -> None:
    """Requests load adapters whose files others may be writing: a mapped one would end the process."""
    folder = lora_folder(tmp_path, WIDE_BASE, 1)
    pairs = read_lora(folder, WIDE_BASE.trunk, 8).pairs
    before = [[tensor.clone() for tensor in pair] for pair in pairs.values()]
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for pair, kept in zip(pairs.values(), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, kept, strict=True))


def test_a_file_of_more_than_adapters_hold_is_not_read(tmp_path: Path) -> None:
    folder = lora_folder(tmp_path, WIDE_BASE, 1)
    os.truncate(folder / "adapter_model.safetensors", 1 << 40)  # sparse
    with pytest.raises(CheckpointError, match=r"has 1,048,576 MiB, more than an adapter of rank 8 \(max_lora_rank\)"):
        read_lora(folder, WIDE_BASE.trunk, 8)


def test_the_widest_linear_may_be_of_any_layer(tmp_path: Path) -> None:
    experts = ExpertsConfig(number=4, per_token=2, width=32, sum_to_one=True, dense_layers=(1,))
    trunk = replace(WIDE_BASE.trunk, architecture="qwen3_moe", qk_norm="head", intermediate_size=512, experts=experts)
    folder = lora_folder(tmp_path, WIDE_BASE, 1)
    pair = {"A": torch.ones(8, 64), "B": torch.ones(512, 8)}
    start = "base_model.model.model.layers.1.mlp.up_proj.lora_"
    save_file({f"{start}{side}.weight": t for side, t in pair.items()}, folder / "adapter_model.safetensors")
    assert list(read_lora(folder, trunk, 64).pairs) == [(1, "mlp.up_proj")]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = lora_folder(tmp_path, WIDE_BASE, 1)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} is (no file|missing)"):
        read_lora(folder, WIDE_BASE.trunk, 64)


def test_patterns_choose_as_in_peft(tmp_path: Path) -> None:
    patterns = {
        r"layers\.[02]\..*up_proj": 12,
        r"model\.layers\.(0|1|[2-9])\.mlp\.down_proj": 20,
        "self_attn.q_proj": 28,
    }
    plain = read_lora(lora_folder(tmp_path / "plain", WIDE_BASE, 1, 4), WIDE_BASE.trunk, 4).pairs
    found = read_lora(lora_folder(tmp_path / "own", WIDE_BASE, 1, 4, alpha_pattern=patterns), WIDE_BASE.trunk, 4).pairs
    alpha = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())["lora_alpha"]
    for (layer, name), (down, up) in plain.items():
        own = {"mlp.up_proj": 12 if layer in (0, 2) else alpha, "mlp.down_proj": 20, "self_attn.q_proj": 28}
        assert torch.equal(found[layer, name][0], down)
        torch.testing.assert_close(found[layer, name][1], up * (own.get(name, alpha) / alpha))


@pytest.mark.parametrize("starts", [("",), ("", "base_model.model.")])
def test_names_may_lack_the_start_that_peft_writes(tmp_path: Path, starts: tuple[str, ...]) -> None:
    folder = lora_folder(tmp_path, WIDE_BASE, 1)
    expected = read_lora(folder, WIDE_BASE.trunk, 8).pairs
    file = folder / "adapter_model.safetensors"
    bare = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(file).items()}
    save_file({start + name: tensor.clone() for name, tensor in bare.items() for start in starts}, file)
    if len(starts) > 1:
        with pytest.raises(CheckpointError, match=r"holds lora_[AB] of model\.layers\.\d\.\S+ twice"):
            read_lora(folder, WIDE_BASE.trunk, 8)
        return
    found = read_lora(folder, WIDE_BASE.trunk, 8).pairs
    assert found.keys() == expected.keys()
    assert all(torch.equal(a, b) for key in found for a, b in zip(found[key], expected[key], strict=True))


@pytest.mark.parametrize(("ranks", "is_refused"), [({}, True), ({"up_proj": 8}, True), ({"_proj": 8, ".*": 8}, False)])
def test_a_rank_that_is_not_the_tensors_is_refused(tmp_path: Path, ranks: dict[str, int], is_refused: bool) -> None:
    """As PEFT does: alpha / r would be another scaling than that of its training."""
    folder = lora_folder(tmp_path, WIDE_BASE, 1, 8, r=16, rank_pattern=ranks)
    if is_refused:
        with pytest.raises(CheckpointError, match=r"is 8, but adapter_config.json says 16: they are of two adapters"):
            read_lora(folder, WIDE_BASE.trunk, 64)
    else:
        assert read_lora(folder, WIDE_BASE.trunk, 64).pairs


@pytest.mark.parametrize("start", ["model.layers", "model.language_model.layers", "language_model.model.layers"])
@pytest.mark.parametrize("base", [WITH_IMAGES, {"model_type": "qwen3_vl", "text_config": {"hidden_size": 64}}])
def test_adapters_of_a_model_with_images_are_of_its_text_part(tmp_path: Path, start: str, base: dict[str, Any]) -> None:
    folder = lora_folder(tmp_path, WIDE_BASE, 1, 4, alpha_pattern={f"{start}.0.mlp.up_proj": 12})
    wanted = read_lora(folder, WIDE_BASE.trunk, 4).pairs
    file = folder / "adapter_model.safetensors"
    tensors = {name.replace("model.layers", start, 1): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    found = read_lora(folder, WIDE_BASE.trunk, 4, base).pairs
    assert found.keys() == wanted.keys()
    assert torch.equal(found[1, "mlp.up_proj"][1], wanted[1, "mlp.up_proj"][1])
    assert torch.equal(found[0, "mlp.up_proj"][1], tensors[f"base_model.model.{start}.0.mlp.up_proj.lora_B.weight"] * 3)


def test_an_adapter_of_the_part_that_sees_is_refused(tmp_path: Path) -> None:
    folder = lora_folder(tmp_path, WIDE_BASE, 1)
    file = folder / "adapter_model.safetensors"
    seeing = {f"base_model.model.model.vision_tower.q_proj.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
    save_file({**load_file(file), **seeing}, file)
    with pytest.raises(CheckpointError, match=r"vision_tower\.q_proj\.lora_A\.weight is of no linear"):
        read_lora(folder, WIDE_BASE.trunk, 64, WITH_IMAGES)


def test_folders_without_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder: name one with adapter_config"):
        read_lora(tmp_path / "none", WIDE_BASE.trunk, 64)
    with pytest.raises(CheckpointError, match="is missing"):
        read_lora(tmp_path, WIDE_BASE.trunk, 64)
    folder = lora_folder(tmp_path, WIDE_BASE, 1)
    with pytest.raises(CheckpointError, match=r"the rank of .* is 8, above max_lora_rank \(7\): raise it"):
        read_lora(folder, WIDE_BASE.trunk, 7)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors weights are read"):
        read_lora(folder, WIDE_BASE.trunk, 64)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/adapter", "~a\0b", "a\0b", "a" * 300, f"{'a/' * 3000}b"])
def test_paths_that_no_folder_can_have_are_refused(path: str) -> None:
    folders = LoraFolders(TorchLoras(WIDE_BASE.trunk, torch.float32, torch.device("cpu")), WIDE_BASE.trunk, 8)
    with pytest.raises(CheckpointError, match=r"is no folder|cannot be read") as refused:
        folders.load(1, path)
    assert len(str(refused.value)) < 400
