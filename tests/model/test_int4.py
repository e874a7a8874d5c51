"""4-bit linears: the grid they keep, small and large batches alike, where they are used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hamburger.engine.build import _uses_int4
from hamburger.model.assemble import assemble, is_int4
from hamburger.model.checkpoint import Checkpoint, load_checkpoint
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.int4 import (
    GROUP,
    Adapted,
    Int4Linear,
    can_quantize,
    crossover,
    dequantize,
    fits,
    is_on_grid,
    quantize,
)
from hamburger.model.sources import resolve_source
from small_models import CPU, core_of, params, random_tensors, run_core, trunk_config

pytestmark = pytest.mark.skipif(not can_quantize(torch.float32, CPU), reason="this build of torch has no 4-bit kernels")
DTYPES = [torch.float32, torch.bfloat16]


def on_grid(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Weights as a GGUF file's Q4_1 tensors hold them: the least and the greatest of a group have codes 0 and 15."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns // GROUP, GROUP), generator=draw)
    codes[..., 0], codes[..., 1] = 0, 15
    scales = torch.rand(rows, columns // GROUP, 1, generator=draw) / 50 + 0.01
    return (codes * scales - torch.rand(rows, columns // GROUP, 1, generator=draw) / 5).flatten(1)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_what_is_on_a_grid_keeps_its_codes(seed: int, dtype: torch.dtype) -> None:
    weight = on_grid(4, 3 * GROUP, seed)
    exact, *_ = quantize(weight, torch.float32)
    rounded, scales, zeros = quantize(weight.to(dtype), dtype)
    assert torch.equal(exact, rounded)
    assert set(exact.unflatten(1, (-1, GROUP)).amax(-1).flatten().tolist()) == {15}
    error = (dequantize(rounded, scales, zeros) - weight).abs().max() / weight.abs().max()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


def test_any_weight_is_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(16, 64)
    codes, scales, zeros = quantize(weight, torch.float32)
    assert (int(codes.min()), int(codes.max())) == (0, 15)
    off = (dequantize(codes, scales, zeros) - weight).abs().unflatten(1, (-1, GROUP)).amax(-1)
    assert (off <= 0.5001 * scales).all()


def test_equal_weights_have_no_step() -> None:
    weight = torch.full((16, 32), 0.5)
    assert torch.equal(dequantize(*quantize(weight, torch.float32)), weight)


def test_a_grid_is_known_by_its_values() -> None:
    weight = on_grid(100, 128)
    assert is_on_grid(weight)
    assert is_on_grid(weight.bfloat16())
    assert not is_on_grid(torch.randn(100, 128))
    assert not is_on_grid(weight[:, :40])
    weight[5] += 0.01 * torch.randn(128)
    assert not is_on_grid(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_and_many_give_the_same(dtype: torch.dtype, rank: int, has_bias: bool) -> None:
    torch.manual_seed(3)
    source = Adapted(torch.randn(48, 64) / 8, torch.randn(rank, 64) / 8, torch.randn(48, rank) / 8)
    linear = Int4Linear(source, torch.randn(48).to(dtype) if has_bias else None, dtype)
    exact = dequantize(*quantize(source.weight, dtype))
    if rank:
        exact = exact + dequantize(*quantize(source.up, dtype)) @ dequantize(*quantize(source.down, dtype))
    with torch.inference_mode():
        for shape in ((1, 64), (5, 64), (2, 3, 64)):
            x = torch.randn(shape).to(dtype)
            linear.max_rows = 6
            few = linear(x)
            linear.max_rows = 0
            many = linear(x)
            wanted = x.float() @ exact.T + (0 if linear.bias is None else linear.bias.float())
            assert few.shape == many.shape == (*shape[:-1], 48)
            for y in (few, many):
                assert (y.float() - wanted).norm() / wanted.norm() < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


def test_joined_parts_are_their_linears_side_by_side() -> None:
    torch.manual_seed(4)
    parts = [Adapted(torch.randn(16, 32), torch.randn(32, 32), torch.randn(16, 32)), Adapted.plain(torch.randn(16, 32))]
    joined = Adapted.join(parts)
    wanted = torch.cat([part.weight + part.up @ part.down for part in parts])
    torch.testing.assert_close(joined.weight + joined.up @ joined.down, wanted)
    assert fits(joined)
    assert not fits(Adapted.plain(torch.randn(10, 32)))
    assert not fits(Adapted.plain(torch.randn(16, 40)))
    assert not fits(Adapted(torch.randn(16, 32), torch.randn(8, 32), torch.randn(16, 8)))


class Timed:
    """Takes 2 in many-row form, and as many as there are rows in 4 bits, on a clock that it moves itself."""

    max_rows = 0
    now = 0.0

    def __call__(self, x: Sequence[int]) -> None:
        Timed.now += len(x) / 3 if len(x) <= self.max_rows else 2


def test_the_crossover_is_where_4_bits_are_faster_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    linears: Any = [Timed(), Timed()]
    monkeypatch.setattr(time, "perf_counter", lambda: Timed.now)
    assert crossover(linears, lambda rows: [torch.zeros(rows)] * 2) == 4
    monkeypatch.setattr(Timed, "__call__", lambda self, x: setattr(Timed, "now", Timed.now + 1))
    assert crossover(linears, lambda rows: [torch.zeros(rows)] * 2) == 0


@pytest.mark.parametrize("max_rows", [1, 100])
def test_a_model_gives_the_groups_of_its_dequantised_weights(monkeypatch: pytest.MonkeyPatch, max_rows: int) -> None:
    monkeypatch.setattr("hamburger.model.assemble.crossover", lambda linears, inputs: max_rows)
    config = ModelConfig(trunk=trunk_config(hidden_size=64, intermediate_size=96))
    tensors = random_tensors(config, seed=5)
    tensors |= {
        n: on_grid(t.shape[0], t.shape[1], i) for i, (n, t) in enumerate(tensors.items()) if n.endswith("_proj.weight")
    }
    assert is_int4(config, tensors, {})
    plain = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=256)
    model = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=256, int4={})
    assert (plain.int4_max_rows, model.int4_max_rows) == (None, max_rows)
    assert sum(isinstance(m, Int4Linear) for m in model.modules()) == 4 * config.trunk.num_layers
    prompts = {"a": ([5, 6, 7], params(max_tokens=8)), "b": ([9], params(max_tokens=8))}
    found = [run_core(core_of(m), prompts) for m in (plain, model)]
    assert [[g.token_ids for g in groups] for groups in found[0].values()] == [
        [g.token_ids for g in groups] for groups in found[1].values()
    ]


@pytest.fixture(scope="module", params=["builtin", None])
def embedded(request: pytest.FixtureRequest) -> Checkpoint:
    return load_checkpoint(resolve_source(request.param), torch.bfloat16)


def test_auto_takes_what_has_4_bits_already(embedded: Checkpoint) -> None:
    assert _uses_int4("auto", embedded, torch.bfloat16, CPU)
    assert not _uses_int4("auto", embedded, torch.float32, CPU)
    assert not _uses_int4("none", embedded, torch.bfloat16, CPU)
    name = "model.layers.3.mlp.down_proj.weight"
    trained = Checkpoint(embedded.config, embedded.tensors | {name: torch.randn(576, 1536)})
    assert not _uses_int4("auto", trained, torch.bfloat16, CPU)
    assert _uses_int4("int4", trained, torch.float32, CPU)
    with pytest.raises(ConfigError, match="quantization is int4"):
        _uses_int4("int4", embedded, torch.float16, CPU)
