"""Weights of 8 bits on a GPU: whole models of them, and who gets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hamburger.engine.device import load
from hamburger.engine.device.load import _int8, _kernels
from hamburger.engine.types.config import EngineArgs
from hamburger.model.assemble import assemble
from hamburger.model.backend import TorchBackend
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.gpu.int8 import Int8Linear
from hamburger.model.steps import EagerSteps
from quantised import norm_error
from small_models import CPU, core_of, graft_config, grafted, params, random_tensors, run_core, tokens_of, trunk_config

CUDA = torch.device("cuda", 0)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def model(config: ModelConfig, *, int8: bool) -> EagerSteps:
    tensors = random_tensors(config)
    how = Execution(packed=False, int8=int8)
    return assemble(config, tensors, dtype=torch.bfloat16, device=CPU, max_positions=256, execution=how)


@pytest.mark.parametrize("short_list_size", [None, 32])
def test_a_whole_model(short_list_size: int | None) -> None:
    graft = graft_config(short_list_size=short_list_size, features="fused" if short_list_size else "positions")
    config = ModelConfig(trunk=trunk_config(**WIDE), graft=graft)
    ours, plain = model(config, int8=True), model(config, int8=False)
    assert (ours.quantization, plain.quantization) == ("int8", "none")
    backend = ours.backend
    assert isinstance(backend, TorchBackend)
    parts = backend.model
    assert not any(isinstance(m, nn.Linear) for part in (parts.trunk, parts.micro_decoder) for m in part.modules())
    assert {m.codes.dtype for m in parts.modules() if isinstance(m, Int8Linear)} == {torch.int8}
    assert not isinstance(backend.heads.first, Int8Linear)  # first tokens keep the dtype
    assert any(isinstance(m, nn.Linear) for m in parts.stop_head.modules())
    assert any(isinstance(m, nn.Linear) for m in parts.embedder.modules())
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    head = backend.heads.micro
    assert isinstance(head, Int8Linear)
    wanted = states @ (parts.head_weight[parts.short_list] if short_list_size else parts.head_weight).t()
    assert norm_error(head(states), wanted) < 2e-2
    requests = {"a": ([5, 9, 13, 2], params(confidence=0.0, ignore_eos=True)), "b": ([7], params(ignore_eos=True))}
    answers = run_core(core_of(ours), requests)
    assert len(tokens_of(answers["a"])) == len(tokens_of(answers["b"])) == 16
    assert max(len(output.token_ids) for output in answers["a"]) == 4


def test_a_plain_base_has_one_head() -> None:
    ours = model(ModelConfig(trunk=trunk_config(**WIDE)), int8=True).backend
    assert isinstance(ours, TorchBackend)
    assert ours.heads.micro is ours.heads.first
    assert not isinstance(ours.heads.first, Int8Linear)


def test_adapters_of_composed_slots_keep_their_numbers() -> None:
    ours = model(grafted(trunk_config(**WIDE), adapter_rank=32), int8=True)
    assert isinstance(ours.backend, TorchBackend)
    for name, module in ours.backend.model.trunk.named_modules():
        assert isinstance(module, nn.Linear) == name.endswith((".down", ".up"))
    answers = run_core(core_of(ours), {"a": ([5, 9, 13, 2], params(confidence=0.0, ignore_eos=True))})
    assert max(len(output.token_ids) for output in answers["a"]) == 4


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that Triton needs."""
    monkeypatch.setattr(load, "why_no_triton", lambda device: None)


@pytest.mark.usefixtures("a_gpu")
def test_who_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(quantization="int8")
    config = ModelConfig(trunk=trunk_config(**WIDE))
    assert not _int8(EngineArgs(), torch.bfloat16, CUDA)
    assert _int8(args, torch.bfloat16, CUDA)
    assert _int8(args, torch.float16, CUDA)
    assert _kernels(args, config, torch.bfloat16, CUDA) is None
    with pytest.raises(ConfigError, match=r"quantization is int8.*: set dtype to auto, bfloat16 or float16"):
        _int8(args, torch.float32, CUDA)
    monkeypatch.setattr(load, "why_no_triton", lambda device: "the package triton is not installed")
    with pytest.raises(ConfigError, match=r"quantization is int8.*the package triton is not installed: use none"):
        _int8(args, torch.bfloat16, CUDA)


def test_a_cpu_has_an_int8_of_its_own() -> None:
    assert not _int8(EngineArgs(quantization="int8"), torch.bfloat16, CPU)


def test_a_format_that_is_none() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, none, int8, int4"):
        EngineArgs(quantization="fp4")  # type: ignore[arg-type]
