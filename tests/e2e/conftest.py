"""Real servers, started as a user starts them: one with the embedded default, one with a small random HAMburger."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.config import ModelConfig
from real_server import RealServer
from small_models import graft_config, random_tensors, trunk_config

BUILTIN = Path(__file__).parent.parent.parent / "model" / "builtin"
MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def embedded() -> Iterator[RealServer]:
    """The embedded default with a short context, so that its limit is quickly reached."""
    with RealServer("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory", "1GiB") as server:
        yield server


@pytest.fixture(scope="session")
def grafted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of our format: random weights, the embedded tokenizer's vocabulary, real groups."""
    folder = tmp_path_factory.mktemp("grafted")
    trunk = trunk_config(vocab_size=49152, hidden_size=32, num_layers=4, eos_token_ids=(2,))
    config = ModelConfig(trunk=trunk, graft=graft_config(default_confidence=0.4))
    save_checkpoint(folder, config, {name: t.to(torch.float32) for name, t in random_tensors(config, seed=1).items()})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def grafted(grafted_folder: Path) -> Iterator[RealServer]:
    options = ("--served-model-name", "burger", "--dtype", "float32", "--kv-cache-memory", "64MiB")
    with RealServer(str(grafted_folder), *options, env={"HAMBURGER_MAX_NUM_SEQS": "40"}) as server:
        yield server
