"""Small checkpoints on disk, for tests of what loads and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.checkpoints.load import Checkpoint, load_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.config import ModelConfig
from hamburger.model.tensor_shapes import tensor_shapes
from small_models import graft_config, trunk_config

Tensors = dict[str, Tensor]
PLAIN = ModelConfig(trunk=trunk_config())
GRAFTED = ModelConfig(trunk=trunk_config(), graft=graft_config())


def load(folder: Path, dtype: torch.dtype = torch.float32, base: Path | None = None) -> Checkpoint:
    return load_checkpoint(resolve_source(str(folder), None if base is None else str(base)), dtype)


def save_hf(folder: Path, config: ModelConfig, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(trunk_config_json(config.trunk)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def graft_only(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in tensor_shapes(PLAIN)}


def edit_config(folder: Path, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text()) | changes
    settings = {key: value for key, value in settings.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(settings))


def assert_equal(ours: Tensors, expected: Tensors) -> None:
    assert ours.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []
