"""benchmarks/roofline: rates of this machine, and what parts of a step reach of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import prefill
from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import load_kernels
from native_models import WIDE, models
from roofline.clocked import BOUNDED, PARTS, ClockedCore
from roofline.plot import plot_parts
from roofline.rates import NoRates, Rates, measure_rates
from small_models import core_of, graft_config, params, random_model, trunk_config

RATES = Rates(byte_products=8e9, code_products=16e9, float_products=2e9, bytes_read=1e9)


def test_a_part_takes_the_longer_of_reading_and_multiplying() -> None:
    assert RATES.seconds(1e9) == 1.0
    assert RATES.seconds(1e9, byte_products=4e9) == 1.0
    assert RATES.seconds(1e9, byte_products=8e9, float_products=2e9) == 2.0
    assert RATES.seconds(1e9, byte_products=8e9, code_products=8e9) == 1.5


@pytest.mark.skipif(load_kernels() is None, reason="the rates are those of a processor that the kernels know")
def test_rates_of_this_machine() -> None:
    rates = measure_rates(1, read_bytes=1 << 26, repeats=2)
    # Orders of magnitude: a machine that tests share may do anything.
    assert rates.byte_products > 1e9
    assert rates.code_products > 1e9
    assert rates.float_products > 1e9
    assert rates.bytes_read > 1e8


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NoRates, match="no compiler"):
        measure_rates(1)
    monkeypatch.setattr("shutil.which", lambda name: "false")
    with pytest.raises(NoRates, match="was not compiled"):
        measure_rates(1)


@pytest.mark.skipif(load_kernels() is None, reason="the kernels were not built, or cannot run here")
def test_the_parts_of_steps_and_what_they_read_and_multiply(tmp_path: Path) -> None:
    trunk = trunk_config(**WIDE)
    _, native = models(ModelConfig(trunk=trunk, graft=graft_config()))
    core = core_of(native)
    of = ClockedCore(core, [])
    for index in range(2):
        core.add(SubmitRequest(str(index), [5, 6, 7], params(max_tokens=50, ignore_eos=True, confidence=1.0), 0.0))
    core.step()  # the prompts
    found = of.steps(4)
    assert (found.tokens, found.groups, found.rows, found.drafts) == (8, 8, 8, 0)
    # Four slots at the first of these steps: the prompt's, and the first token's.
    assert found.context_slots == found.attended == 2 * (4 + 5 + 6 + 7)
    assert sum(found.parts) == pytest.approx(found.seconds)
    spent = dict(zip(PARTS, found.parts, strict=True))
    assert min(spent.pop("micro-steps"), *spent.values()) >= 0
    assert min(spent.values()) > 0

    bounds = of.bounds(found, Rates(1e9, 2e9, 1e9, 1e30))  # memory is free
    assert bounds is not None
    a, t = trunk.num_heads * trunk.head_dim, trunk
    weights = t.hidden_size * (2 * a + 2 * t.num_kv_heads * t.head_dim + 3 * t.intermediate_size)
    assert bounds["linears"] == pytest.approx(2 * t.num_layers * weights / 1e9)
    assert bounds["attention"] == pytest.approx(2 * a * t.num_layers * found.attended / 4 / 1e9)
    assert bounds["head"] == pytest.approx(2 * t.vocab_size * t.hidden_size / 2e9)  # 4 bits
    bounds = of.bounds(found, Rates(1e30, 1e30, 1e30, 1e9))
    assert bounds is not None
    # 8 bits, and a scale of half precision for 32.
    assert bounds["linears"] == pytest.approx(t.num_layers * weights / 32 * 34 / 1e9)
    slot = 2 * t.num_kv_heads * t.head_dim * 4 * t.num_layers
    assert bounds["attention"] == pytest.approx(slot * found.context_slots / 4 / 1e9)

    core = core_of(native, max_num_batched_slots=40)
    core.add(SubmitRequest("prompt", list(range(3, 23)), params(max_tokens=1, confidence=1.0), 0.0))
    of = ClockedCore(core, [])
    found = of.prefill(20)
    assert (found.tokens, found.rows, found.heads, found.attended) == (1, 20, 1, 210)
    assert sum(found.parts) == pytest.approx(found.seconds)
    told = prefill.one(of, Rates(1e9, 2e9, 1e9, 1e30), found)
    assert told["of_rate"] == pytest.approx(20 * t.num_layers * weights / found.seconds / 1e9)
    assert told["of_roofline"]["head"] * told["parts_ms"]["head"] == pytest.approx(
        1000 * t.vocab_size * t.hidden_size / 2e9
    )
    assert "| 20 |" in prefill.table([prefill.median_of([told, told, told])])

    rows = [
        {"streams": n, "parts_ms": [1.0] * len(PARTS), "bounds_ms": dict.fromkeys(BOUNDED, 0.5)} for n in (1, 2, 16)
    ]
    plot_parts(rows, tmp_path / "parts.png")
    assert (tmp_path / "parts.png").stat().st_size > 1000


def test_without_the_kernels_there_is_only_the_rest() -> None:
    core = core_of(random_model(ModelConfig(trunk=trunk_config(), graft=graft_config())))
    of = ClockedCore(core, [])
    core.add(SubmitRequest("a", [5, 6, 7], params(max_tokens=9, ignore_eos=True, confidence=1.0), 0.0))
    core.step()
    found = of.steps(2)
    assert of.bounds(found, RATES) is None
    assert found.parts[0] > 0
    assert found.parts[0] + found.parts[-1] == pytest.approx(found.seconds)
