"""A model is told from others by what it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.config import ModelConfig
from hamburger.training.forward.fingerprint import fingerprint
from small_models import random_tensors, trunk_config

CONFIG = ModelConfig(trunk=trunk_config(num_layers=2))


def write(folder: Path, seed: int) -> Path:
    save_checkpoint(folder, CONFIG, random_tensors(CONFIG, seed=seed))
    return folder


def told(folder: Path, *settings: object) -> str:
    return fingerprint(resolve_source(str(folder)), *settings, without=("settle.safetensors",))


def test_weights_configuration_and_settings_tell_a_model(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a" / "m", 1), write(tmp_path / "b" / "m", 2)
    shutil.copytree(first, tmp_path / "copy")
    before = told(first)
    assert len(before) == 16
    assert before == told(tmp_path / "copy")  # wherever it lies
    assert len({before, told(second), told(first, "cpu"), told(first, "cuda")}) == 4
    (first / "settle.safetensors").write_bytes(b"")
    assert told(first) == before
    config = first / "config.json"
    config.write_text(config.read_text() + " ")
    assert told(first) != before
