"""The kernels for weights of 8 bits against the product spelt out, in Triton's interpreter or on a GPU. What they
write is poisoned beforehand, and so is what lies behind the tensors that they read.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from hamburger.model.assemble import assemble
from hamburger.model.backend import TorchBackend
from hamburger.model.config import ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.gpu import int8
from hamburger.model.gpu.int8 import (
    Int8Linear,
    plain_product,
    product_for,
    to_codes,
)
from hamburger.model.gpu.int8_product import (
    FORMS,
    MOST_ROWS,
    ROWS_OF_ALL,
    form_for,
    multiply_into,
    scaled_product,
    steps_of_part,
    written_out,
)
from hamburger.model.steps import EagerSteps
from kernel_checks import any_shapes
from quantised import norm_error, numbers
from same_groups import assert_same_groups
from slow_cases import slow_but
from small_models import core_of, graft_config, params, random_tensors, run_core, trunk_config

NAN = float("nan")
# A float32 sum is rounded once, as the reference's is; one in another order may round to the next number. The
# interpreter cuts bfloat16 off where it should round, by up to 2**-7.
LARGEST_ERROR = {torch.bfloat16: 8e-3, torch.float16: 3e-4, torch.float32: 3e-6}
FEW, MANY = 1, 132  # processors: tiles alone fill the device, or do not


def followed_by(x: Tensor, poison: float) -> Tensor:
    """x of two dimensions, behind whose end others lie."""
    return torch.cat((x, torch.full_like(x[:1].expand(200, -1), poison)))[: len(x)]


def problem(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, codes, scales, bias."""
    seed = rows + outputs + inputs
    codes, scales = to_codes(numbers(outputs, inputs, seed) / 8)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
    bias = torch.randn(outputs, generator=generator).to(device, dtype) if biased else None
    return followed_by(x, NAN), followed_by(codes.to(device), 127), followed_by(scales.to(device), NAN), bias


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN: the sums of parts, too."""
    new_empty = torch.Tensor.new_empty

    def filled(*args: Any, **named: Any) -> Tensor:
        made = new_empty(*args, **named)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def check_product(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    biased: bool,
    processors: int,
    device: torch.device,
) -> None:
    asked = problem(rows, outputs, inputs, dtype, device, biased)
    y = scaled_product(*asked, processors)
    assert (y.dtype, y.shape) == (dtype, (rows, outputs))
    assert norm_error(y, plain_product(*asked)) < LARGEST_ERROR[dtype]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype"),
    [
        (1, 64, 512, torch.bfloat16),
        (1, 1, 1, torch.float32),
        (16, 96, 2048, torch.bfloat16),
        (63, 130, 300, torch.bfloat16),
        (65, 129, 600, torch.float16),
        (200, 40, 520, torch.float32),
        (MOST_ROWS + 1, 33, 48, torch.float32),
    ],
)
def test_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    for biased, processors in ((False, FEW), (True, MANY)):
        check_product(rows, outputs, inputs, dtype, biased, processors, kernel_device)


@pytest.mark.usefixtures("poisoned")
@any_shapes(20)
@given(
    rows=st.integers(1, 90),
    outputs=st.integers(1, 300),
    inputs=st.integers(1, 1400),
    dtype=st.sampled_from(sorted(LARGEST_ERROR, key=str)),
    biased=st.booleans(),
    processors=st.sampled_from((FEW, MANY)),
)
def test_any_shape(kernel_device: torch.device, **shape: Any) -> None:
    check_product(**shape, device=kernel_device)


def test_no_rows_and_rows_that_do_not_lie_together(kernel_device: torch.device) -> None:
    x, codes, scales, bias = problem(12, 70, 160, torch.float32, kernel_device, True)
    assert scaled_product(x[:0], codes, scales, bias, MANY).shape == (0, 70)
    every_third = x.view(4, 3, 160)[:, 1]
    y = scaled_product(every_third, codes, scales, bias, MANY)
    assert norm_error(y, plain_product(every_third, codes, scales, bias)) < LARGEST_ERROR[torch.float32]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
def test_a_row_is_the_same_in_every_batch_of_a_form_and_has_its_own_faults(
    kernel_device: torch.device,
) -> None:
    """So padding changes nothing, and what is no number stays in its row."""
    x, codes, scales, bias = problem(16, 130, 700, torch.bfloat16, kernel_device, True)
    whole = scaled_product(x, codes, scales, bias, MANY)
    assert torch.equal(scaled_product(x[3:4], codes, scales, bias, MANY)[0], whole[3])
    x = x.clone()
    x[7, 600], x[9, 0] = NAN, float("inf")
    y = scaled_product(x, codes, scales, bias, MANY)
    assert not bool(y[[7, 9]].isfinite().any())
    others = [i for i in range(16) if i not in (7, 9)]
    assert torch.equal(y[others], whole[others])


def test_float16_sums_beyond_its_range_are_those_of_float32(kernel_device: torch.device) -> None:
    """Codes are up to 127, so their sums would not fit before they are scaled."""
    x = torch.full((1, 4096), 8.0, dtype=torch.float16, device=kernel_device)
    codes, scales = to_codes(torch.full((64, 4096), 0.01, device=kernel_device))
    y = scaled_product(x, codes, scales, None, MANY)
    torch.testing.assert_close(y, torch.full_like(y, 327.68), atol=0, rtol=1e-3)


def test_many_rows_round_the_weights_once_more(kernel_device: torch.device) -> None:
    asked = problem(MOST_ROWS + 3, 48, 96, torch.bfloat16, kernel_device, True)
    x, codes, scales, bias = asked
    y = scaled_product(*asked, MANY)
    assert torch.equal(y, written_out(*asked))
    assert bias is not None
    wanted = x.double() @ (codes.double() * scales.double()).t() + bias.double()
    assert norm_error(y, wanted) < 5e-3
    by_kernel = x.new_full((MOST_ROWS, 48), NAN)
    multiply_into(by_kernel, x[:MOST_ROWS], codes, scales, bias, MANY)
    assert norm_error(by_kernel, wanted[:MOST_ROWS]) < 5e-3


@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_split_where_tiles_would_not_fill_the_device(form: Any) -> None:
    for inputs in (1, 100, 576, 2048, 8192):
        steps = -(-inputs // form.block_inputs)
        for tiles in (1, 32, 131, 132, 500):
            of_part = steps_of_part(form, tiles, inputs, 132)
            parts = -(-steps // of_part)
            assert 1 <= of_part <= steps
            assert (parts - 1) * of_part < steps  # none is empty
            assert parts == 1 or of_part * form.block_inputs >= 256
            assert tiles < 132 or parts == 1
            assert tiles * (parts - 1) <= form.programs * 132
    assert steps_of_part(FORMS[0], 32, 8192, 132) * 128 < 8192


def test_what_is_compiled_beforehand_is_all_that_is_launched() -> None:
    def launched(rows: int, outputs: int, inputs: int) -> tuple[int, bool]:
        form = form_for(rows, torch.bfloat16)
        tiles = -(-rows // form.block_rows) * -(-outputs // form.block_outputs)
        return form.rows, steps_of_part(form, tiles, inputs, 132) * form.block_inputs < inputs

    for shape in ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (8192, 576), (131072, 2048), (64, 64)):
        compiled = {launched(rows, *shape) for rows in ROWS_OF_ALL}
        assert {launched(rows, *shape) for rows in range(1, MOST_ROWS + 1)} == compiled


def test_the_device_says_what_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert product_for(torch.device("cpu")) is plain_product
    of_gpu = SimpleNamespace(multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_gpu)
    chosen = product_for(torch.device("cuda", 1))
    assert isinstance(chosen, partial)
    assert (chosen.func, chosen.keywords) == (scaled_product, {"processors": 114})


def model_of(config: ModelConfig, device: torch.device, backend: Any) -> EagerSteps:
    how = Execution(packed=False, attention=backend, int8=True, static_shapes=backend == "triton")
    tensors = random_tensors(config, 1)
    return assemble(config, tensors, dtype=torch.float32, device=device, max_positions=64, execution=how)


@pytest.mark.parametrize("shape", slow_but(["fused"], ["positions", "fused"]))
def test_answers_of_a_whole_model_are_those_of_the_reference(
    shape: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels together, groups in static shapes, as on a GPU; in float32, to compare digit by digit."""
    graft: dict[str, Any] = {"features": "fused", "short_list_size": 40} if shape == "fused" else {}
    trunk = trunk_config(num_layers=2, qkv_bias=shape == "fused")
    config = ModelConfig(trunk=trunk, graft=graft_config(feature_layers=(0, 1), **graft))
    plain = model_of(config, torch.device("cpu"), "torch")
    by_kernels = partial(scaled_product, processors=MANY)
    monkeypatch.setattr(int8, "product_for", lambda device: by_kernels)
    ours = model_of(config, kernel_device, "triton")
    assert isinstance(ours.backend, TorchBackend)
    linears = [m for m in ours.backend.model.modules() if isinstance(m, Int8Linear)]
    assert linears
    assert not any(m.product is plain_product for m in linears)
    requests = {
        str(n): ([(7 * n + i) % 90 + 2 for i in range(n)], params(confidence=c, max_tokens=4, logprobs=4))
        for n, c in ((1, 0.0), (5, 0.55), (11, 1.0))
    }
    found, wanted = (
        run_core(core_of(m, max_num_seqs=3, max_num_batched_slots=8, max_model_len=64), requests) for m in (ours, plain)
    )
    assert_same_groups(found, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("rows", [1, 24, 300, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_a_linear_is_captured_and_follows_its_inputs(dtype: torch.dtype, rows: int) -> None:
    weight, bias = numbers(3072, 2048, 6).to(dtype), torch.randn(3072).to(dtype)
    linear, reference = Int8Linear.of(weight.cuda(), bias.cuda()), Int8Linear.of(weight, bias)
    x = torch.randn(rows, 2048, device="cuda").to(dtype)
    linear(x)  # cuBLAS prepares itself
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x)
    for seed in range(2):
        x.copy_(numbers(rows, 2048, seed) / 100)  # float16 ends at 65,504
        y.fill_(NAN)
        graph.replay()
        first = y.clone()
        assert norm_error(first.cpu(), reference(x.cpu())) < 1e-2
        graph.replay()
        assert torch.equal(y, first)
