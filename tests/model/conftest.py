"""Tiny matrices: one thread computes them faster than two. And which kernels there are, and where they run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from exactness import Meddling
from hamburger.model.cpu.library import Kernels, load_kernels
from native_models import SETS


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a Triton kernel's tensors: the CPU for its interpreter, or a GPU (TRITON_INTERPRET=0 pytest -m
    gpu)."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no GPU here, or TRITON_INTERPRET=0 did not ask for it")
    if request.param == "cpu" and not interpreted:
        pytest.skip("TRITON_INTERPRET=0: pytest -m gpu compiles the kernels and runs them on a GPU")
    return torch.device(request.param)


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    if loaded is None:
        pytest.skip(f"this processor has no {request.param}")
    return loaded


@pytest.fixture
def meddling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified groups draft what Meddling says, which knows the answer by its prediction_ids."""
    monkeypatch.setattr("hamburger.engine.core.sequence.AnswerDrafts", Meddling)
