"""Weights of 8 bits on a GPU: whole models of them, and who gets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hamburger.engine.device import load
from hamburger.engine.device.load import _eight_bits, _kernels
from hamburger.engine.types.config import EngineArgs
from hamburger.model.assemble import assemble
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.gpu.int8 import EightBitLinear
from hamburger.model.hamburger import HamburgerModel
from quantised import norm_error
from small_models import CPU, core_of, graft_config, grafted, params, random_tensors, run_core, tokens_of, trunk_config

CUDA = torch.device("cuda", 0)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def model(config: ModelConfig, *, eight_bits: bool) -> HamburgerModel:
    tensors = random_tensors(config)
    how = Execution(packed=False, eight_bits=eight_bits)
    return assemble(config, tensors, dtype=torch.bfloat16, device=CPU, max_positions=256, how=how)


@pytest.mark.parametrize("short_list_size", [None, 32])
def test_a_whole_model(short_list_size: int | None) -> None:
    graft = graft_config(short_list_size=short_list_size, features="fused" if short_list_size else "positions")
    config = ModelConfig(trunk=trunk_config(**WIDE), graft=graft)
    ours, plain = model(config, eight_bits=True), model(config, eight_bits=False)
    assert (ours.quantization, plain.quantization) == ("int8", "none")
    assert not any(isinstance(m, nn.Linear) for part in (ours.trunk, ours.micro_decoder) for m in part.modules())
    assert {m.codes.dtype for m in ours.modules() if isinstance(m, EightBitLinear)} == {torch.int8}
    assert not isinstance(ours.head, EightBitLinear)  # first tokens keep the dtype
    assert any(isinstance(m, nn.Linear) for m in ours.stop_head.modules())
    assert any(isinstance(m, nn.Linear) for m in ours.embedder.modules())
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    head = ours.short_head if short_list_size else ours.micro_head
    assert isinstance(head, EightBitLinear)
    wanted = states @ (ours.head_weight[ours.short_list] if short_list_size else ours.head_weight).t()
    assert norm_error(head(states), wanted) < 2e-2
    requests = {"a": ([5, 9, 13, 2], params(confidence=0.0, ignore_eos=True)), "b": ([7], params(ignore_eos=True))}
    answers = run_core(core_of(ours), requests)
    assert len(tokens_of(answers["a"])) == len(tokens_of(answers["b"])) == 16
    assert max(len(output.token_ids) for output in answers["a"]) == 4


def test_adapters_of_merged_slots_keep_their_numbers() -> None:
    ours = model(grafted(trunk_config(**WIDE), merge_rank=32), eight_bits=True)
    for name, module in ours.trunk.named_modules():
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
    assert not _eight_bits(EngineArgs(), torch.bfloat16, CUDA)
    assert _eight_bits(args, torch.bfloat16, CUDA)
    assert _eight_bits(args, torch.float16, CUDA)
    assert _kernels(args, config, torch.bfloat16, CUDA) is None
    with pytest.raises(ConfigError, match=r"quantization is int8.*: set dtype to auto, bfloat16 or float16"):
        _eight_bits(args, torch.float32, CUDA)
    monkeypatch.setattr(load, "why_no_triton", lambda device: "the package triton is not installed")
    with pytest.raises(ConfigError, match=r"quantization is int8.*the package triton is not installed: use none"):
        _eight_bits(args, torch.bfloat16, CUDA)


def test_a_cpu_has_an_int8_of_its_own() -> None:
    assert not _eight_bits(EngineArgs(quantization="int8"), torch.bfloat16, CPU)


def test_a_format_that_is_none() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, none, int8, int4"):
        EngineArgs(quantization="fp4")  # type: ignore[arg-type]
