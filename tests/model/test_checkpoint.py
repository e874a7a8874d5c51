"""Our format and Hugging Face folders: what loads, and every way in which a checkpoint is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GRAFTED, PLAIN, Tensors, assert_equal, edit_config, graft_only, load, save_hf
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ModelConfig
from hamburger.model.tensor_shapes import tensor_shapes
from small_models import graft_config, random_tensors, trunk_config


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_folder(tmp_path: Path, tied: bool) -> None:
    config = ModelConfig(trunk=trunk_config(tie_word_embeddings=tied))
    tensors = random_tensors(config)
    loaded = load(save_hf(tmp_path, config, tensors))
    assert loaded.config == config
    assert_equal(loaded.tensors, tensors)


def test_shards(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    save_hf(tmp_path, PLAIN, tensors)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_equal(load(tmp_path).tensors, tensors)
    save_file({names[0]: tensors[names[0]], names[9]: tensors[names[9]]}, tmp_path / "part-0.safetensors")
    with pytest.raises(CheckpointError, match=rf"{names[9]} is in another file"):
        load(tmp_path)
    (tmp_path / "part-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-0\.safetensors"):
        load(tmp_path)
    for wrong in (None, {}, {"a": "../elsewhere.safetensors"}, {"a": 1}):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(CheckpointError, match="weight_map"):
            load(tmp_path)


def test_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(), graft=graft_config(short_list_size=5))
    save_checkpoint(tmp_path, config, random_tensors(config))
    tensors = load(tmp_path, torch.bfloat16).tensors
    assert tensors.pop("short_list").dtype == torch.int64
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def drop(tensors: Tensors) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]


def add(tensors: Tensors) -> None:
    tensors["model.layers.2.self_attn.q_proj.bias"] = torch.zeros(32)


def reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(31)


def quantise(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)


def untie(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop, r"missing.*model\.layers\.2\.mlp\.up_proj\.weight"),
        (add, r"unknown.*model\.layers\.2\.self_attn\.q_proj\.bias"),
        (reshape, r"misshaped.*model\.norm\.weight \(is \[31\], should be \[32\]\)"),
        (quantise, r"model\.norm\.weight.*int8"),
        (untie, r"lm_head\.weight differs"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, change: Callable[[Tensors], None], named: str) -> None:
    tensors = random_tensors(PLAIN)
    change(tensors)
    with pytest.raises(CheckpointError, match=named):
        load(save_hf(tmp_path, PLAIN, tensors))


def test_tensors_of_other_names_are_told_beside_those_that_are_missing(tmp_path: Path) -> None:
    tensors = {f"base_model.{name}": tensor for name, tensor in random_tensors(PLAIN).items()}
    told = r"missing tensors: model\..* and .*; unknown tensors: base_model\.model\."
    with pytest.raises(CheckpointError, match=told):
        load(save_hf(tmp_path, PLAIN, tensors))


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"and 33 more\."):
        load(save_hf(tmp_path, PLAIN, {}))


def test_copies_and_buffers_that_other_tools_write_are_dropped(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    assert_equal(load(save_hf(tmp_path, PLAIN, tensors | extra)).tensors, tensors)


@pytest.mark.parametrize("kept_bytes", [0, 4, 3000])
def test_a_file_cut_short_is_named(tmp_path: Path, kept_bytes: int) -> None:
    file = save_hf(tmp_path, PLAIN, random_tensors(PLAIN)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "stop_head.2.bias"])
def test_what_is_no_finite_number_is_named(tmp_path: Path, name: str, value: float) -> None:
    tensors = random_tensors(GRAFTED)
    tensors[name].view(-1)[-1] = value
    save_checkpoint(tmp_path, GRAFTED, tensors)
    with pytest.raises(CheckpointError, match=rf"{name} holds numbers that are not finite in float32"):
        load(tmp_path)


def test_what_another_dtype_does_not_hold_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][0, 0] = 1e6
    save_hf(tmp_path, PLAIN, tensors)
    with pytest.raises(CheckpointError, match=rf"{name} holds numbers that are not finite in float16"):
        load(tmp_path, dtype=torch.float16)
    tensors[name][:] = 30_000.0  # whose sum overflows
    save_hf(tmp_path, PLAIN, tensors)
    load(tmp_path, dtype=torch.float16)


def test_the_one_file_counts_where_the_index_of_another_model_was_left(tmp_path: Path) -> None:
    tensors = random_tensors(PLAIN)
    save_hf(tmp_path, PLAIN, tensors)
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(load(tmp_path).tensors, tensors)


def test_files_that_git_did_not_fetch_are_named_so(tmp_path: Path) -> None:
    file = save_hf(tmp_path, PLAIN, random_tensors(PLAIN)) / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"pointer of Git LFS.* `git lfs pull`"):
        load(tmp_path)
    file.rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="its shards need their index"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_weights_that_are_a_link_to_nothing_are_called_so(tmp_path: Path, name: str) -> None:
    (save_hf(tmp_path, PLAIN, {}) / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "0")
    with pytest.raises(CheckpointError, match=f"{name} is a link to a file that is not there"):
        load(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (save_hf(tmp_path, PLAIN, {}) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "graft",
    [
        None,
        graft_config(),
        graft_config(features="fused"),
        graft_config(features="fused", micro_norm=True, short_list_size=17, max_group=3),
        graft_config(micro_norm=True, micro_layers=1, feature_layers=(3,)),
        graft_config(short_list_size=96, default_confidence=1, expected_tokens_per_kv=1.7),
        graft_config(stop_scale=(0.5, 1.25, 2.0, 1.0), stop_bias=(0.1, -0.25, 0.0, 3e38)),
        graft_config(micro_layers=3),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_our_format_round_trip(tmp_path: Path, graft: Any, tied: bool) -> None:
    config = ModelConfig(trunk=trunk_config(tie_word_embeddings=tied), graft=graft)
    tensors = random_tensors(config)
    save_checkpoint(tmp_path / "whole", config, tensors)
    loaded = load(tmp_path / "whole")
    assert loaded.config == config
    assert_equal(loaded.tensors, tensors)
    trunk_names = tensor_shapes(ModelConfig(trunk=config.trunk))
    save_hf(tmp_path / "base", config, {name: tensors[name] for name in trunk_names})
    grafts = {name: tensor for name, tensor in tensors.items() if name not in trunk_names}
    save_checkpoint(tmp_path / "grafts", config, grafts, base="../base")
    loaded = load(tmp_path / "grafts")
    assert loaded.config == config
    assert_equal(loaded.tensors, tensors)


def test_grafts_may_lie_in_several_files(tmp_path: Path) -> None:
    tensors = random_tensors(GRAFTED)
    save_checkpoint(tmp_path, GRAFTED, tensors)
    (tmp_path / "model.safetensors").unlink()
    for i, part in enumerate((graft_only(tensors), {n: t for n, t in tensors.items() if n in tensor_shapes(PLAIN)})):
        save_file(part, tmp_path / f"{i}.safetensors")
    assert_equal(load(tmp_path).tensors, tensors)


@pytest.mark.parametrize("max_file_bytes", [1, 20_000, 10**9])
def test_shards_of_our_own_load_again(tmp_path: Path, max_file_bytes: int) -> None:
    tensors = random_tensors(GRAFTED)
    save_checkpoint(tmp_path, GRAFTED, tensors, max_file_bytes=max_file_bytes)
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert all(len(held) == 1 or sum(t.nbytes for t in held.values()) <= max_file_bytes for held in files.values())
    assert len(files) == {1: len(tensors), 10**9: 1}.get(max_file_bytes, len(files))
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert_equal(load(tmp_path).tensors, tensors)


def test_a_whole_folders_own_generation_config_gives_the_end_tokens(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, GRAFTED, random_tensors(GRAFTED))
    assert load(tmp_path).config.trunk.eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load(tmp_path).config.trunk.eos_token_ids == (7, 8)


def graft(**changes: Any) -> dict[str, Any]:
    fields = {"max_group": 4, "merger_heads": 4, "micro_layers": 2, "feature_layers": [1, 2, 3]} | changes
    return {"graft": {name: value for name, value in fields.items() if value is not ...}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": 1.0}, "unknown keys: rope_theta"),
        ({"format_version": 2}, "format_version is 2"),
        ({"format_version": ...}, "format_version is None"),
        ({"trunk": ...}, "trunk or name a base"),
        ({"trunk": []}, "trunk must be an object"),
        ({"base": "builtin"}, "one of the two"),
        ({"graft": 4}, "graft must be an object"),
        (graft(micro_heads=2), "unknown keys: micro_heads"),
        (graft(max_group=...), "max_group"),
        (graft(max_group="4"), "graft.max_group is '4'"),
        (graft(max_group=40), "max_group is 40"),
        (graft(features="both"), "graft.features is 'both'"),
        (graft(feature_layers=3), "graft.feature_layers is 3"),
        (graft(feature_layers=[1, 4]), "feature_layers"),
        (graft(micro_norm=1), "graft.micro_norm is 1"),
        (graft(stop_scale=2.0), r"graft\.stop_scale is 2\.0: it must be a list"),
        (graft(stop_bias=[0, 0, 0, "1"]), r"graft\.stop_bias is \[0, 0, 0, '1'\]: it must be a list"),
        (graft(stop_bias=[0, 0, 0, True]), r"graft\.stop_bias is .*: it must be a list"),
        (graft(stop_scale=[1, 1, 1]), r"stop_scale is \[1, 1, 1\]: it must hold max_group \(4\) numbers"),
        (graft(stop_scale=[1, 1, 0.0, 1]), r"stop_scale is .*: each number must be above 0"),
        (graft(stop_scale=[1, 1, float("inf"), 1]), r"stop_scale is .*finite"),
        (graft(stop_bias=[0, 0, float("nan"), 1]), r"stop_bias is .*finite"),
        (graft(stop_bias=[0, 0, -1e39, 1]), r"stop_bias is .*finite"),
        ({"adapter": {"rank": 0, "alpha": 1.0}}, "rank of at least 1"),
        ({"adapter": {"rank": 2}}, "rank and alpha"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    save_checkpoint(tmp_path, GRAFTED, random_tensors(GRAFTED))
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


@pytest.mark.parametrize("ids", [[0, 1, 96], [0, 1, -1], [0, 1, 1]])
def test_a_short_list_holds_different_ids_of_the_vocabulary(tmp_path: Path, ids: list[int]) -> None:
    config = ModelConfig(trunk=trunk_config(), graft=graft_config(short_list_size=3))
    save_checkpoint(tmp_path, config, random_tensors(config) | {"short_list": torch.tensor(ids)})
    with pytest.raises(CheckpointError, match="short_list"):
        load(tmp_path)


def test_saving_refuses_an_incomplete_model(tmp_path: Path) -> None:
    tensors = random_tensors(GRAFTED)
    del tensors["stop_head.2.bias"]
    with pytest.raises(CheckpointError, match=r"stop_head\.2\.bias"):
        save_checkpoint(tmp_path / "new", GRAFTED, tensors)
    assert not (tmp_path / "new").exists()


def test_what_is_saved_is_safetensors_and_json(tmp_path: Path) -> None:
    tensors = random_tensors(GRAFTED)
    save_checkpoint(tmp_path, GRAFTED, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_equal(load_file(tmp_path / "model.safetensors"), tensors)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
