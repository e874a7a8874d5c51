"""The published checkpoint format, on the reference's own tiny file; test_golden_tiny.py checks its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import edit_config
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource

DATA = Path(__file__).parent.parent / "data" / "golden-tiny"


@pytest.fixture
def published() -> dict[str, Any]:
    checkpoint = torch.load(DATA / "reference-tiny.ckpt", weights_only=True)
    assert isinstance(checkpoint, dict)
    return checkpoint


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    (tmp_path / "config.json").write_text((DATA / "base_config.json").read_text())
    return ModelSource("lightning", "tiny", tmp_path / "tiny.ckpt", tmp_path, tmp_path)


def load(checkpoint: Any, source: ModelSource) -> Any:
    torch.save(checkpoint, source.path)
    return load_checkpoint(source, torch.float32)


def test_graft_constants_and_names(published: dict[str, Any], source: ModelSource) -> None:
    config, tensors = (loaded := load(published, source)).config, loaded.tensors
    assert config.graft is not None
    assert (config.graft.max_group, config.graft.merger_heads, config.graft.micro_layers) == (4, 64, 4)
    assert config.graft.feature_layers == (3, 7, 11, 15)
    state = published["state_dict"]
    for ours, theirs in {
        "model.layers.9.mlp.up_proj.weight": "model.model.layers.9.mlp.up_proj.weight",
        "embedder.k_proj.bias": "comp_embedder.merger.k_proj.bias",
        "embedder.out_proj.weight": "comp_embedder.out_proj.weight",
        "embedder.pos": "comp_embedder.merger.pos",
        "micro_decoder.layers.3.self_attn.o_proj.weight": "micro_step_decoder.decoders.3.self_attn.o_proj.weight",
        "stop_head.4.bias": "micro_step_decoder.stop_head.4.bias",
    }.items():
        assert torch.equal(tensors[ours], state[theirs]), ours


def test_fewer_micro_layers_are_counted_from_the_file(published: dict[str, Any], source: ModelSource) -> None:
    for name in [name for name in published["state_dict"] if ".decoders.3." in name]:
        del published["state_dict"][name]
    assert load(published, source).config.graft.micro_layers == 3


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("comp_embedder.merger.q_proj.bias", "missing.*embedder.q_proj.bias"),
        ("micro_step_decoder.decoders.1.mlp.up_proj.weight", "missing.*micro_decoder.layers.1.mlp.up_proj.weight"),
        ("model.model.embed_tokens.weight", "embedding"),
    ],
)
def test_a_missing_tensor_is_named(published: dict[str, Any], source: ModelSource, missing: str, named: str) -> None:
    del published["state_dict"][missing]
    with pytest.raises(CheckpointError, match=named):
        load(published, source)


@pytest.mark.parametrize(
    "name", ["other.weight", "comp_embedder.gate.weight", "model.model.layers.16.mlp.up_proj.weight"]
)
def test_an_unknown_tensor_is_named(published: dict[str, Any], source: ModelSource, name: str) -> None:
    published["state_dict"][name] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=f"unknown.*{name.removeprefix('model.')}"):
        load(published, source)


def test_max_group_that_disagrees_with_the_position_table(published: dict[str, Any], source: ModelSource) -> None:
    published["hyper_parameters"]["max_steps"] = 5
    with pytest.raises(CheckpointError, match=r"misshaped.*embedder\.pos \(is \[4, 32\], should be \[5, 32\]\)"):
        load(published, source)


@pytest.mark.parametrize("tied", ["comp_embedder.embedding.weight", "model.lm_head.weight"])
def test_a_copy_of_the_embedding_must_be_equal(published: dict[str, Any], source: ModelSource, tied: str) -> None:
    published["state_dict"][tied] = published["state_dict"][tied] + 1
    with pytest.raises(CheckpointError, match="differs from the"):
        load(published, source)


@pytest.mark.parametrize("part", ["state_dict", "hyper_parameters"])
def test_other_checkpoints_are_refused(published: dict[str, Any], source: ModelSource, part: str) -> None:
    del published[part]
    with pytest.raises(CheckpointError, match=part):
        load(published, source)


class NotATensor:
    """An object that a pickle would have to run code for."""


def test_objects_are_never_unpickled(published: dict[str, Any], source: ModelSource) -> None:
    published["callbacks"] = NotATensor()
    with pytest.raises(CheckpointError, match="without running code"):
        load(published, source)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", None])
def test_a_broken_file_is_a_checkpoint_error(source: ModelSource, content: bytes | None) -> None:
    whole = (DATA / "reference-tiny.ckpt").read_bytes()
    source.path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(CheckpointError, match=r"tiny\.ckpt"):
        load_checkpoint(source, torch.float32)


def test_no_base_is_refused(source: ModelSource) -> None:
    with pytest.raises(CheckpointError, match="--base"):
        load_checkpoint(ModelSource("lightning", "tiny", source.path, None, source.path), torch.float32)


def test_a_base_of_another_depth_is_refused(published: dict[str, Any], source: ModelSource) -> None:
    config = (DATA / "base_config.json").read_text().replace('"num_hidden_layers": 16', '"num_hidden_layers": 15')
    (source.path.parent / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="not a multiple of 4"):
        load(published, source)


def test_a_base_whose_weights_are_retold_is_refused(published: dict[str, Any], source: ModelSource) -> None:
    """A Granite's tensors have a Llama's names and shapes, but the file's would be computed without its factors."""
    edit_config(source.path.parent, model_type="granite")
    with pytest.raises(CheckpointError, match=r"config.json: model_type is 'granite', but the published format is kno"):
        load(published, source)
