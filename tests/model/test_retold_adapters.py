"""LoRA adapters on folders of ours that hold a trunk which was retold: refused where the linears are others then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hamburger.model.checkpoints.config.folder import read_model_config
from hamburger.model.checkpoints.load import load_checkpoint, save_checkpoint
from hamburger.model.checkpoints.lora_folder import base_config, read_lora
from hamburger.model.checkpoints.sources import CheckpointError, resolve_source
from hamburger.model.config import GraftConfig
from lora_folders import saved_adapter
from peer import saved
from relatives import KINDS
from small_models import random_tensors


@pytest.mark.parametrize(
    "kind", ["granite", "granitemoe", "granite4", "hyperclovax", "ernie4_5", "helium", "glm", "glm4"]
)
def test_an_adapter_is_refused_where_the_linears_were_retold_and_nothing_says_how(tmp_path: Path, kind: str) -> None:
    """A folder that holds its trunk says of which kind that was, and no more: B would be another's."""
    peer = saved(tmp_path, **KINDS[kind])
    folder = saved_adapter(tmp_path / "adapter", peer, 1, r=4, target_modules=["q_proj", "o_proj"])
    checkpoint = load_checkpoint(resolve_source(str(tmp_path)), torch.float32)
    save_checkpoint(tmp_path / "own", checkpoint.config, checkpoint.tensors)
    own = resolve_source(str(tmp_path / "own"))
    trunk = load_checkpoint(own, torch.float32).config.trunk
    with pytest.raises(CheckpointError, match=rf"holds the weights of a {KINDS[kind]['model_type']} in another form"):
        read_lora(folder, trunk, 4, base_config(own))
    if trunk.experts is None:  # which has no graft
        graft = GraftConfig(max_group=2, merger_heads=2, micro_layers=1, feature_layers=(2,))
        config = replace(checkpoint.config, graft=graft)
        grown = random_tensors(config)
        of_graft = {name: grown[name] for name in grown.keys() - checkpoint.tensors.keys()}
        save_checkpoint(tmp_path / "referring", config, of_graft, base="..")
        referring = resolve_source(str(tmp_path / "referring"))
        assert read_lora(folder, read_model_config(referring).trunk, 4, base_config(referring)).pairs


@pytest.mark.parametrize("kind", ["seed_oss", "phi3", "gemma", "gemma3_text", "olmo2"])
def test_an_adapter_fits_where_the_linears_are_as_they_were(tmp_path: Path, kind: str) -> None:
    peer = saved(tmp_path, **KINDS.get(kind, {"model_type": kind}))
    folder = saved_adapter(tmp_path / "adapter", peer, 1, r=4, target_modules=["o_proj", "down_proj"])
    source = resolve_source(str(tmp_path))
    checkpoint = load_checkpoint(source, torch.float32)
    save_checkpoint(tmp_path / "own", checkpoint.config, checkpoint.tensors)
    own = resolve_source(str(tmp_path / "own"))
    wanted = read_lora(folder, checkpoint.config.trunk, 4, base_config(source)).pairs
    found = read_lora(folder, load_checkpoint(own, torch.float32).config.trunk, 4, base_config(own)).pairs
    assert found.keys() == wanted.keys()
    assert all(torch.equal(a, b) for key in wanted for a, b in zip(found[key], wanted[key], strict=True))
