"""Weights in e4m3: the packing, the product against the one spelt out, and a whole model of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hamburger.engine.config import EngineArgs
from hamburger.engine.load import _float8, _kernels
from hamburger.model.assemble import assemble
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.float8 import Float8Linear, fits, plain_product, scaled_product, to_float8, use_float8
from hamburger.model.hamburger import HamburgerModel
from small_models import CPU, core_of, graft_config, params, random_tensors, run_core, tokens_of, trunk_config

CUDA = torch.device("cuda", 0)
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def norm_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows of very different size, as weights and states have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.logspace(-3, 2, rows)[:, None]


def test_a_number_is_kept_to_one_part_in_sixteen_of_itself_or_of_the_smallest_step() -> None:
    x = numbers(24, 64)
    packed, scale = to_float8(x)
    assert packed.dtype == torch.float8_e4m3fn
    assert scale.shape == (24, 1)
    error = (packed.float() * scale - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, scale * 2**-10)).all())
    assert bool((packed.float().abs().amax(-1) == 448).all())  # the largest of each row uses the whole range


def test_zeros_stay_zeros_and_what_is_no_number_is_seen() -> None:
    x = torch.zeros(3, 32)
    x[1, 0], x[2, 5] = float("nan"), float("inf")
    packed, scale = to_float8(x)
    rows = packed.float() * scale
    assert bool((rows[0] == 0).all())
    assert bool(rows[1].isnan().all())
    assert bool(rows[2].isnan().any())


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_linear_computes_with_packed_weights_and_inputs(rows: int) -> None:
    x, weight = numbers(rows, 64, 1).bfloat16(), numbers(48, 64, 2)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(3)).bfloat16()
    y = Float8Linear(weight, bias)(x.view(rows, 1, 64))
    assert y.shape == (rows, 1, 48)
    assert y.dtype == torch.bfloat16
    x8, weight8 = ((packed.double() * scale) for packed, scale in (to_float8(x), to_float8(weight)))
    assert norm_error(y.view(rows, 48), x8 @ weight8.t() + bias) < 5e-3  # bfloat16's rounding
    assert 5e-3 < norm_error(y.view(rows, 48), x.float() @ weight.t() + bias) < 6e-2  # e4m3's


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(1, 64, 48), (5, 96, 16), (33, 128, 256)])
def test_the_products_are_the_same(shape: tuple[int, int, int], device: torch.device) -> None:
    rows, inputs, outputs = shape
    x, weight = to_float8(numbers(rows, inputs, 4).to(device)), to_float8(numbers(outputs, inputs, 5).to(device))
    assert norm_error(scaled_product(*x, *weight), plain_product(*x, *weight)) < 4e-3


@pytest.mark.gpu
def test_on_a_gpu_the_linear_is_the_cpu_s() -> None:
    x, weight = numbers(17, 2048, 6).bfloat16(), numbers(512, 2048, 7).bfloat16()
    assert norm_error(Float8Linear(weight.cuda())(x.cuda()).cpu(), Float8Linear(weight)(x)) < 5e-3


def test_only_what_fits_is_replaced() -> None:
    module = nn.Sequential(nn.Linear(32, 48), nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 32)))
    use_float8(module)
    kinds = [type(m) for m in module.modules() if isinstance(m, nn.Linear | Float8Linear)]
    assert kinds == [Float8Linear, nn.Linear, nn.Linear]
    assert not fits(torch.empty(40, 32))


def model(config: ModelConfig, float8: bool) -> HamburgerModel:
    tensors = random_tensors(config)
    return assemble(
        config, tensors, dtype=torch.bfloat16, device=CPU, max_positions=256, how=Execution(packed=False, float8=float8)
    )


@pytest.mark.parametrize("short_list_size", [None, 32])
def test_a_whole_model(short_list_size: int | None) -> None:
    graft = graft_config(short_list_size=short_list_size, features="fused" if short_list_size else "positions")
    config = ModelConfig(trunk=trunk_config(**WIDE), graft=graft)
    ours, plain = model(config, True), model(config, False)
    assert (ours.quantization, plain.quantization) == ("fp8", "none")
    assert not any(isinstance(m, nn.Linear) for part in (ours.trunk, ours.micro_decoder) for m in part.modules())
    assert isinstance(ours.short_head if short_list_size else ours.micro_head, Float8Linear)
    assert not isinstance(ours.head, Float8Linear)  # first tokens keep the dtype
    assert any(isinstance(m, nn.Linear) for m in ours.stop_head.modules())
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    head = ours.short_head if short_list_size else ours.micro_head
    assert head is not None
    wanted = states @ (ours.head_weight[ours.short_list] if short_list_size else ours.head_weight).t()
    assert norm_error(head(states), wanted) < 6e-2
    requests = {"a": ([5, 9, 13, 2], params(confidence=0.0, ignore_eos=True)), "b": ([7], params(ignore_eos=True))}
    answers = run_core(core_of(ours), requests)
    assert len(tokens_of(answers["a"])) == len(tokens_of(answers["b"])) == 16
    assert max(len(output.token_ids) for output in answers["a"]) == 4


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(quantization="fp8")
    config = ModelConfig(trunk=trunk_config(**WIDE))
    assert not _float8(EngineArgs(), torch.bfloat16, CUDA)
    with pytest.raises(ConfigError, match="quantization is fp8, which needs a GPU"):
        _float8(args, torch.bfloat16, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"compute capability 8\.9, and this has 8\.6"):
        _float8(args, torch.bfloat16, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert _float8(args, torch.bfloat16, CUDA)
    with pytest.raises(ConfigError, match="set dtype to auto or bfloat16"):
        _float8(args, torch.float16, CUDA)
    assert _kernels(args, config, torch.bfloat16, CPU) is None
    with pytest.raises(ConfigError, match="must be one of auto, none, int8, int4, fp8"):
        EngineArgs(quantization="fp4")  # type: ignore[arg-type]
