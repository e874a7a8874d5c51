"""Two processes on one machine, over gloo: the same course as one process with the same global batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from hamburger.training.errors import TrainingError
from hamburger.training.run.train import Job
from training_runs import losses, random_source, validations, write_base
from training_worker import distributed_recipe

TESTS = Path(__file__).parent.parent / "helpers"


def launch(*arguments: str) -> None:
    """Run the worker in two processes, with the environment that `torchrun` gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "training_worker.py"), *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(outputs))


def test_two_processes_take_the_course_of_one(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    launch(str(base), str(tmp_path))
    one = Job(distributed_recipe(base), [random_source(24)], tmp_path / "one", device="cpu")
    assert one.run(Console(quiet=True), lambda: False)
    assert len(losses(tmp_path / "one")) == 6
    for two in (tmp_path / "replicated", tmp_path / "sharded"):
        assert losses(two) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
        # Adam does not see the gradient's scale, but its norm does.
        assert losses(two, "grad_norm") == pytest.approx(losses(tmp_path / "one", "grad_norm"), rel=1e-4)
        for ours, expected in zip(validations(two), validations(tmp_path / "one"), strict=True):
            assert ours["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert ours["base_agreement"] == pytest.approx(expected["base_agreement"], abs=1e-5)
            assert [p["tokens_per_kv"] for p in ours["dial"]] == [p["tokens_per_kv"] for p in expected["dial"]]
        weights, single = (load_file(run / "step-000006" / "model.safetensors") for run in (two, tmp_path / "one"))
        # No softmax sees a bias of all keys: its gradient is rounding, of which Adam makes whole steps.
        seen = single.keys() - {"embedder.k_proj.bias"}
        differences = {name: float((weights[name].float() - single[name].float()).abs().max()) for name in seen}
        # Small gradients, the keys' above all, differ by much of their size, and Adam's steps know nothing else.
        assert {name: d for name, d in differences.items() if d > 3e-5} == {}


def test_packs_that_cannot_be_shared_out_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = distributed_recipe(write_base(tmp_path / "base")).model_copy(update={"packs_per_step": 3})
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 2)
    with pytest.raises(TrainingError, match="packs_per_step is 3: it must be a multiple of the 2 processes"):
        Job(made, [random_source(8)], tmp_path / "run", device="cpu")
