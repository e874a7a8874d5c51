"""The cost model of benchmarks/replay.py: what it fits, and that the steps it is fitted to are what they claim."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hamburger.engine.types.config import EngineArgs
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.config import ModelConfig
from simulation.costs import TERMS, CostModel, StepWork, fit, residual
from simulation.measurement import Case, _Bench, settling_seconds
from small_models import core_of, graft_config, random_model, random_tensors, trunk_config

BUILTIN = Path(__file__).parent.parent.parent / "model" / "builtin"
KNOTS = (1, 2, 4, 8, 16, 32, 64)
TRUE = CostModel(
    KNOTS,
    (0.010, 0.011, 0.012, 0.020, 0.020, 0.030, 0.060),
    dict(zip(TERMS, (5e-4, 4e-6, 2e-7, 1e-6, 3e-3, 2e-4), strict=True)),
    {},
)


def works(number: int) -> list[StepWork]:
    draw = random.Random(0)
    return [
        StepWork(
            rows := draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
            draw.randint(0, rows),
            draw.randint(0, 10_000),
            draw.randint(0, 100_000),
            draw.randint(0, 4000),
            draw.randint(0, 3),
            draw.randint(0, 90),
        )
        for _ in range(number)
    ]


def test_a_fit_finds_the_costs_that_made_the_times() -> None:
    steps = works(120)
    found = fit(steps, [TRUE.seconds(step) for step in steps])
    assert found.knots == KNOTS
    assert found.table == pytest.approx(TRUE.table, rel=1e-3)
    assert found.terms == pytest.approx(TRUE.terms, rel=1e-3)
    assert found.error["median_relative_error"] < 1e-6
    assert CostModel.from_json(found.as_json()) == found


def test_noise_makes_no_cost_negative() -> None:
    draw, steps = random.Random(1), works(60)
    found = fit(steps, [TRUE.seconds(step) * draw.lognormvariate(0, 0.4) for step in steps])
    assert all(value >= 0 for value in found.terms.values())
    assert list(found.table) == sorted(found.table)
    assert found.table[0] >= 0
    assert found.error["median_relative_error"] > 0.05


def test_residual_sees_a_bias() -> None:
    steps = works(20)
    found = residual(TRUE.times(1.5), steps, [TRUE.seconds(step) for step in steps])
    assert found["bias"] == pytest.approx(1.5)
    assert found["median_relative_error"] == pytest.approx(0.5)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        fit(works(3), [1.0] * 3)


def test_more_rows_than_were_measured_go_on_as_the_last_ones() -> None:
    more, most = StepWork(128, 0, 0, 0, 0, 0, 0), StepWork(64, 0, 0, 0, 0, 0, 0)
    assert TRUE.seconds(more) == pytest.approx(TRUE.seconds(most) + 64 * 0.030 / 32)
    assert TRUE.seconds(replace(most, micro_steps=2)) == pytest.approx(0.066)


def test_a_chunk_that_settles_is_timed(tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(vocab_size=49152), graft=graft_config())
    save_checkpoint(tmp_path, config, random_tensors(config))
    shutil.copy(BUILTIN / "tokenizer.json", tmp_path)
    shutil.copy(BUILTIN / "tokenizer_config.json", tmp_path)
    told: list[str] = []
    args = EngineArgs(model=str(tmp_path), dtype="float32", kv_cache_memory=1 << 20, groups="composed")
    assert 0 < settling_seconds(args, told.append) < 1
    assert any("old slots settle" in line for line in told)


def test_timed_steps_do_the_work_that_is_booked() -> None:
    config = ModelConfig(trunk=trunk_config(vocab_size=40_000), graft=graft_config())
    core = core_of(random_model(config))
    runner = core._runner
    bench = _Bench(runner, num_blocks=64, block_size=4, max_model_len=256)  # type: ignore[arg-type]
    cases = {
        Case(3, 8): StepWork(3, 3, 24, 0, 0, 0, 0),
        Case(2, 8, group=4): StepWork(2, 2, 16, 0, 0, 3, 6),
        Case(4, 9, group=2, nth_grows=2): StepWork(4, 4, 36, 0, 0, 1, 2),
        Case(chunk=6, chunk_end=10, chunk_emits=True): StepWork(6, 1, 0, 60, 10, 0, 0),
        Case(2, 8, chunk=6, chunk_end=6): StepWork(8, 2, 16, 36, 6, 0, 0),
    }
    with torch.random.fork_rng():
        for case, work in cases.items():
            found, seconds = bench.run(case)
            assert found == work
            assert seconds > 0
