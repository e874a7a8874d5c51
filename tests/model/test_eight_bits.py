"""Weights of 8 bits on a GPU, of either kind: whole models of them, and who gets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hamburger.engine import load
from hamburger.engine.config import EngineArgs
from hamburger.engine.load import _eight_bits, _kernels
from hamburger.model.assemble import assemble
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.eight_bits import EightBits, use_eight_bits
from hamburger.model.execution import Execution
from hamburger.model.float8 import Float8Linear, fits
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.int8 import Int8Linear
from quantised import norm_error
from small_models import CPU, core_of, graft_config, grafted, params, random_tensors, run_core, tokens_of, trunk_config

CUDA = torch.device("cuda", 0)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
LINEARS: dict[EightBits, type[nn.Module]] = {"fp8": Float8Linear, "int8": Int8Linear}


def test_only_what_fits_is_replaced() -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(32, 48), nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 32)))

    for kind, wanted in (("fp8", [Float8Linear, nn.Linear, nn.Linear]), ("int8", 3 * [Int8Linear])):
        module = layers()
        use_eight_bits(module, kind)  # type: ignore[arg-type]
        assert [type(m) for m in module.modules() if not isinstance(m, nn.Sequential)] == wanted
    assert not fits(torch.empty(40, 32))


def model(config: ModelConfig, kind: EightBits | None) -> HamburgerModel:
    tensors = random_tensors(config)
    how = Execution(packed=False, eight_bits=kind)
    return assemble(config, tensors, dtype=torch.bfloat16, device=CPU, max_positions=256, how=how)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("short_list_size", [None, 32])
def test_a_whole_model(short_list_size: int | None, kind: EightBits) -> None:
    graft = graft_config(short_list_size=short_list_size, features="fused" if short_list_size else "positions")
    config = ModelConfig(trunk=trunk_config(**WIDE), graft=graft)
    ours, plain = model(config, kind), model(config, None)
    assert (ours.quantization, plain.quantization) == (kind, "none")
    assert not any(isinstance(m, nn.Linear) for part in (ours.trunk, ours.micro_decoder) for m in part.modules())
    assert isinstance(ours.short_head if short_list_size else ours.micro_head, LINEARS[kind])
    assert not isinstance(ours.head, LINEARS[kind])  # first tokens keep the dtype
    assert any(isinstance(m, nn.Linear) for m in ours.stop_head.modules())
    assert any(isinstance(m, nn.Linear) for m in ours.embedder.modules())
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    head = ours.short_head if short_list_size else ours.micro_head
    assert head is not None
    wanted = states @ (ours.head_weight[ours.short_list] if short_list_size else ours.head_weight).t()
    assert norm_error(head(states), wanted) < {"fp8": 6e-2, "int8": 2e-2}[kind]
    requests = {"a": ([5, 9, 13, 2], params(confidence=0.0, ignore_eos=True)), "b": ([7], params(ignore_eos=True))}
    answers = run_core(core_of(ours), requests)
    assert len(tokens_of(answers["a"])) == len(tokens_of(answers["b"])) == 16
    assert max(len(output.token_ids) for output in answers["a"]) == 4


@pytest.mark.parametrize("kind", LINEARS)
def test_adapters_of_merged_slots_keep_their_numbers(kind: EightBits) -> None:
    ours = model(grafted(trunk_config(**WIDE), merge_rank=32), kind)
    for name, module in ours.trunk.named_modules():
        assert isinstance(module, nn.Linear) == name.endswith((".down", ".up"))
    answers = run_core(core_of(ours), {"a": ([5, 9, 13, 2], params(confidence=0.0, ignore_eos=True))})
    assert max(len(output.token_ids) for output in answers["a"]) == 4


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compute capability 9.0, with all that Triton needs."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(load, "why_no_triton", lambda device: None)


@pytest.mark.usefixtures("a_gpu")
def test_who_gets_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(quantization="fp8")
    config = ModelConfig(trunk=trunk_config(**WIDE))
    assert _eight_bits(EngineArgs(), torch.bfloat16, CUDA) is None
    assert _eight_bits(args, torch.bfloat16, CUDA) == "fp8"
    with pytest.raises(ConfigError, match="quantization is fp8, which needs a GPU"):
        _eight_bits(args, torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match="set dtype to auto or bfloat16"):
        _eight_bits(args, torch.float16, CUDA)
    assert _kernels(args, config, torch.bfloat16, CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"compute capability 8\.9, and this has 8\.6: use int8 or none"):
        _eight_bits(args, torch.bfloat16, CUDA)


@pytest.mark.usefixtures("a_gpu")
def test_who_gets_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(quantization="int8")
    config = ModelConfig(trunk=trunk_config(**WIDE))
    assert _eight_bits(args, torch.bfloat16, CUDA) == _eight_bits(args, torch.float16, CUDA) == "int8"
    assert _eight_bits(args, torch.bfloat16, CPU) is None  # the compiled kernels have one of their own
    assert _kernels(args, config, torch.bfloat16, CUDA) is None
    with pytest.raises(ConfigError, match=r"quantization is int8.*: set dtype to auto, bfloat16 or float16"):
        _eight_bits(args, torch.float32, CUDA)
    monkeypatch.setattr(load, "why_no_triton", lambda device: "the package triton is not installed")
    with pytest.raises(ConfigError, match=r"quantization is int8.*the package triton is not installed: use none"):
        _eight_bits(args, torch.bfloat16, CUDA)


def test_a_format_that_is_none() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, none, int8, int4, fp8"):
        EngineArgs(quantization="fp4")  # type: ignore[arg-type]
