"""A training run's checkpoint to export, and how exports are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hamburger.model.assemble import model_of
from hamburger.model.checkpoints.config.folder import Adapter
from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.checkpoints.load import load_checkpoint, save_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.config import ModelConfig
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.tensor_shapes import tensor_shapes
from hamburger.training.export.export import ExportOptions
from small_models import CPU, graft_config, random_tensors, trunk_config
from training_runs import words_tokenizer

CONFIG = ModelConfig(trunk=trunk_config(), graft=graft_config(features="fused", short_list_size=40))
TRUNK_NAMES = set(tensor_shapes(ModelConfig(trunk=CONFIG.trunk)))


def write_step(parent: Path) -> Path:
    """A run's checkpoint: graft and adapter over a base that lies beside the run, in float32."""
    tensors = random_tensors(CONFIG)
    base = parent / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(trunk_config_json(CONFIG.trunk)))
    save_file({name: tensors[name] for name in TRUNK_NAMES}, base / "model.safetensors")
    words_tokenizer(96).save(str(base / "tokenizer.json"))
    own = {name: t for name, t in tensors.items() if name not in TRUNK_NAMES}
    generator = torch.Generator().manual_seed(3)
    pair = "adapter.model.layers.2.mlp.down_proj"
    own |= {
        f"{pair}.lora_A": torch.randn(2, 48, generator=generator),
        f"{pair}.lora_B": torch.randn(32, 2, generator=generator),
    }
    folder = parent / "run" / "step-000020"
    save_checkpoint(folder, CONFIG, own, base="../../base", adapter=Adapter(2, 4.0))
    (folder / "training").mkdir()
    (folder / "training" / "state.pt").write_bytes(b"")
    words_tokenizer(96).save(str(folder / "tokenizer.json"))
    (folder.parent / "recipe.yaml").write_text("seed: 12\nvalidation_share: 0.3\n")
    (folder.parent / "latest").write_text("step-000020\n")
    return folder


def options(checkpoint: Path, out: Path, **changes: Any) -> ExportOptions:
    return ExportOptions(checkpoint=checkpoint, out=out, **{"dtype": "float32", **changes})


def tensors_of(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_checkpoint(resolve_source(str(folder)), dtype).tensors


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []


def loaded_model(folder: Path) -> HamburgerModel:
    checkpoint = load_checkpoint(resolve_source(str(folder)), torch.float32)
    return model_of(checkpoint.config, checkpoint.tensors, dtype=torch.float32, device=CPU, max_positions=256)
