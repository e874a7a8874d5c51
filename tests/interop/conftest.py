"""Other people's programs, in an environment of their own, against real servers: `make test-clients`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from client_programs import ROOT, Clients
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN, resolve_source
from peer import hugging_face
from real_server import RealServer


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    venv = Path(os.environ.get("CLIENTS_VENV", ROOT / ".venv-clients")).absolute()
    if not (venv / "bin/python").exists():
        pytest.fail(f"{venv} is not there: `make test-clients` makes it.")
    return Clients(venv, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded base model in float32, as Hugging Face lays a model out."""
    folder = tmp_path_factory.mktemp("base")
    checkpoint = load_checkpoint(resolve_source("builtin"), torch.float32)
    hugging_face(checkpoint.config, checkpoint.tensors).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def base(base_folder: Path) -> Iterator[RealServer]:
    """That folder, served."""
    options = ("--dtype", "float32", "--served-model-name", "base", "--max-model-len", "1024")
    with RealServer(str(base_folder), *options, "--kv-cache-memory", "512MiB") as server:
        yield server


@pytest.fixture(scope="session")
def burger() -> Iterator[RealServer]:
    """The embedded default."""
    with RealServer("--max-model-len", "1024", "--kv-cache-memory", "512MiB") as server:
        yield server


@pytest.fixture(scope="session")
def composed() -> Iterator[RealServer]:
    """The same with composed groups, whose confidence shows in the usage."""
    with RealServer("--groups", "composed", "--max-model-len", "1024", "--kv-cache-memory", "512MiB") as server:
        yield server
