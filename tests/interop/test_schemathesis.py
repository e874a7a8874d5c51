"""schemathesis on our own OpenAPI schema: what it documents is what the server answers, and nothing is a 5xx."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from client_programs import Clients
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN
from hamburger.model.config import ModelConfig
from real_server import RealServer
from small_models import graft_config, random_tensors, trunk_config

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "unsupported_method",
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A small random HAMburger with a short context: every answer is quick."""
    folder = tmp_path_factory.mktemp("small")
    config = ModelConfig(trunk=trunk_config(vocab_size=49152, hidden_size=32, eos_token_ids=(2,)), graft=graft_config())
    save_checkpoint(folder, config, {name: t.to(torch.float32) for name, t in random_tensors(config, seed=1).items()})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUILTIN / name).read_bytes())
    with RealServer(str(folder), "--max-model-len", "64", "--kv-cache-memory", "64MiB") as server:
        yield server


def test_the_schema_is_true(clients: Clients, small: RealServer, tmp_path: Path) -> None:
    said = clients.run(
        "schemathesis", "run", f"{small.url}/openapi.json", "--checks", ",".join(CHECKS), "--max-examples", "60",
        "--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--max-response-time", "10",
        "--no-color", "--seed", "1", "--suppress-health-check", "all",
    )  # fmt: skip
    assert re.search(r"(\d{3,}) generated, \1 passed", said), said
    small.wait_idle()
