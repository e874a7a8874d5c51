"""The kernel of a whole micro-step against the plain micro decoder, in Triton's interpreter or on a GPU. What it writes
is poisoned beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from hamburger.model.assemble import assemble
from hamburger.model.config import ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.gpu.modules import FusedMicroStepDecoder
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.triton_micro_step import MOST_ROWS
from kernel_checks import any_shapes
from quantised import norm_error
from same_groups import assert_same_groups
from slow_cases import slow, slow_but
from small_models import CPU, core_of, grafted, params, random_tensors, run_core, trunk_config
from trunk_shapes import QWEN3

NAN = float("nan")
BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
# (changes to the trunk, to the graft)
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fused": ({}, {"features": "fused", "micro_norm": True}),
    "fused, odd sizes": (
        {**QWEN3, "hidden_size": 72, "intermediate_size": 150, "num_heads": 3, "num_kv_heads": 1, "head_dim": 20},
        {"features": "fused", "micro_layers": 3, "merger_heads": 4},
    ),
    "positions, biases": (BIASED, {"micro_norm": True}),
}


def config_of(shape: str, **changes: Any) -> ModelConfig:
    """changes: to the graft."""
    trunk, graft = SHAPES[shape]
    return config_with(trunk, {**graft, **changes})


def config_with(trunk: dict[str, Any], graft: dict[str, Any]) -> ModelConfig:
    return grafted(trunk_config(**{"num_layers": 2, **trunk}), **{"feature_layers": (0, 1), "micro_layers": 2, **graft})


def model_of(config: ModelConfig, device: torch.device, dtype: torch.dtype, how: Execution) -> HamburgerModel:
    tensors = random_tensors(config, 1)
    return assemble(config, tensors, dtype=dtype, device=device, max_positions=64, how=how)


SINGLE = Execution(packed=False, backend="triton", micro_step_kernel=True)
PARTS = Execution(packed=False, backend="triton")
PLAIN = Execution(packed=False)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN: the states between the stages, and the cache."""
    new_empty = torch.Tensor.new_empty

    def filled(*args: Any, **named: Any) -> Tensor:
        made = new_empty(*args, **named)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def states(model: HamburgerModel, rows: int) -> list[Tensor]:
    """Of three micro-steps, before the last of which every second row ends."""
    generator = torch.Generator().manual_seed(rows)
    embed = model.embed_tokens.weight

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(embed)

    size = embed.shape[1]
    found = []
    with torch.inference_mode():
        cache = model.micro_decoder.start(drawn(rows, 2, size))
        for step in range(3):
            kept = torch.arange(0, rows, 2 if step == 2 else 1)
            if step == 2:
                cache = cache.select(kept.to(embed.device))
            found.append(model.micro_decoder(drawn(rows, size)[kept.to(embed.device)], cache, model.rotary))
    return found


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        slow(MOST_ROWS, torch.float32),
        (3, torch.bfloat16),
        pytest.param(3, torch.float32, marks=pytest.mark.gpu),  # the interpreter takes seconds for each
        pytest.param(MOST_ROWS, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("shape", slow_but(["positions, biases"], SHAPES))
def test_states_are_those_of_the_plain_decoder(
    shape: str, rows: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    check_states(config_of(shape), rows, dtype, kernel_device)


def check_states(config: ModelConfig, rows: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    exact = states(model_of(config, CPU, torch.float32, PLAIN), rows)
    found = states(model_of(config, kernel_device, dtype, SINGLE), rows)
    for a, b in zip(found, exact, strict=True):
        assert a.shape == b.shape
        assert a.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(a.cpu(), b, atol=1e-5, rtol=1e-5)
        else:
            # The interpreter cuts bfloat16 off where it should round.
            assert norm_error(a.float().cpu(), b) < (2e-2 if kernel_device.type == "cuda" else 3e-2)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Widths that are no multiples of a tile's."""
    kv_heads = draw(st.integers(1, 2))
    trunk = {
        "hidden_size": 4 * draw(st.integers(2, 30)),
        "intermediate_size": draw(st.integers(1, 150)),
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(2, 20)),
        **{name: draw(st.booleans()) for name in ("qk_norm", *BIASED)},
    }
    features = draw(st.sampled_from(["fused", "positions"]))
    return config_with(trunk, {"features": features, "micro_layers": draw(st.integers(1, 2)), "merger_heads": 4})


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@any_shapes(3)
@given(configs(), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_states_of_any_shape(kernel_device: torch.device, config: ModelConfig, rows: int, dtype: torch.dtype) -> None:
    check_states(config, rows, dtype, kernel_device)


def test_more_rows_take_the_parts(kernel_device: torch.device) -> None:
    config = config_of("fused", micro_layers=1)
    single, parts = (model_of(config, kernel_device, torch.float32, how) for how in (SINGLE, PARTS))
    for a, b in zip(states(single, MOST_ROWS + 1), states(parts, MOST_ROWS + 1), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    decoder = single.micro_decoder
    assert isinstance(decoder, FusedMicroStepDecoder)
    assert decoder.kernel is not None
    x = torch.zeros(MOST_ROWS + 1, config.trunk.hidden_size, device=kernel_device)
    with pytest.raises(ValueError, match=f"^{MOST_ROWS + 1} rows: this kernel takes 1 to {MOST_ROWS}"):
        decoder.kernel(x, None, (x, x), x, x, 0)


def test_weights_lie_in_memory_once(kernel_device: torch.device) -> None:
    decoder = model_of(config_of("fused"), kernel_device, torch.float32, SINGLE).micro_decoder
    assert isinstance(decoder, FusedMicroStepDecoder)
    assert decoder.kernel is not None
    held = {weight.untyped_storage().data_ptr() for weight in decoder.kernel.weights if weight is not None}
    assert {parameter.untyped_storage().data_ptr() for parameter in decoder.layers.parameters()} <= held


@pytest.mark.parametrize("shape", slow_but(["fused"], ["fused", "positions, biases"]))
def test_answers_are_those_of_the_plain_model(shape: str, kernel_device: torch.device) -> None:
    config = config_of(shape)
    requests = {
        str(n): ([(7 * n + i) % 90 + 2 for i in range(n)], params(confidence=c, max_tokens=6, logprobs=4))
        for n, c in ((1, 0.0), (5, 0.55), (11, 1.0))
    }
    wanted, found = (
        run_core(core_of(model, max_num_seqs=3, max_num_batched_slots=8, max_model_len=64), requests)
        for model in (
            model_of(config, CPU, torch.float32, PLAIN),
            model_of(config, kernel_device, torch.float32, SINGLE),
        )
    )
    assert {len(output.token_ids) for outputs in wanted.values() for output in outputs} > {1}
    assert_same_groups(found, wanted)


@pytest.mark.slow
def test_many_launches_stay_in_step(kernel_device: torch.device) -> None:
    """All programs wait for each other every time: the states stay the same, and no arrival is lost."""
    model = model_of(config_of("fused"), kernel_device, torch.float32, SINGLE)
    decoder = model.micro_decoder
    assert isinstance(decoder, FusedMicroStepDecoder)
    assert decoder.kernel is not None
    first = states(model, 2)
    for _ in range(1000 if kernel_device.type == "cuda" else 1):
        for a, b in zip(states(model, 2), first, strict=True):
            assert torch.equal(a, b)
    assert decoder.kernel.arrived.item() % decoder.kernel.programs == 0


ELSEWHERE = (Execution(micro_step_kernel=True), Execution(backend="triton", eight_bits="int8", micro_step_kernel=True))


@pytest.mark.parametrize("how", ELSEWHERE, ids=["torch", "int8"])
def test_what_it_does_not_go_with_is_an_error(how: Execution) -> None:
    with pytest.raises(ValueError, match="the micro-step kernel reads whole weights"):
        model_of(config_of("fused"), CPU, torch.float32, how)
