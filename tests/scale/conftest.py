"""Our application on Ray Serve, with two replicas of the embedded model on CPU: `make test-scale`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_programs import ROOT
from ray_cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    python = Path(os.environ.get("SCALE_VENV", ROOT / ".venv-scale")).absolute() / "bin/python"
    if not python.exists():
        pytest.fail(f"{python} is not there: `make test-scale` makes it.")
    cluster = Cluster(python, tmp_path_factory.mktemp("home"))
    try:
        cluster.deploy()
        yield cluster
    finally:
        cluster.stop()
