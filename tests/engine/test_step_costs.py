"""What is measured of steps when an engine with verified groups starts."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from hamburger.engine.device import step_costs
from hamburger.engine.device.step_costs import measure_costs
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from small_models import CPU, graft_config, random_model, trunk_config


class SlowFirst:
    """Steps of another device, on this one: the first of each number of rows compiles kernels."""

    def __init__(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.device = ModelConfig(trunk=trunk_config(), graft=graft_config()), torch.device(device)
        self.seen: list[tuple[int, int]] = []
        monkeypatch.setattr(step_costs, "_LONGEST_SECONDS", 0.04)
        make = step_costs._batch
        on_cpu = SimpleNamespace(device=CPU)
        monkeypatch.setattr(step_costs, "_batch", lambda steps, *rest: make(on_cpu, *rest))

    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        size = len(batch.emit), batch.max_group_limit
        if size not in self.seen:
            time.sleep(0.05)
        self.seen.append(size)
        zeros = torch.zeros(1)
        return StepOutput(zeros, zeros, zeros, None)


def test_the_first_step_of_a_gpu_does_not_count_and_its_largest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedKVCache(trunk_config(), 64, 4, torch.float32, CPU)
    steps = SlowFirst("cuda", monkeypatch)
    found = measure_costs(steps, cache, 22, 64, None)  # type: ignore[arg-type]
    assert found.rows == (1, 2, 3, 4, 6, 8, 12, 16, 22)
    assert max(found.steps) < 40
    assert {size for _, size in steps.seen} == {1, 4}
    steps = SlowFirst("cpu", monkeypatch)
    found = measure_costs(steps, cache, 4, 64, None)  # type: ignore[arg-type]
    assert found.rows == (1, 2, 3, 4)
    assert min(found.steps) > 40  # steps of a CPU may take so long each time: once is enough


def test_real_steps_are_measured_with_drafts_and_without() -> None:
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()))
    cache = PagedKVCache(model.config.trunk, 64, 4, torch.float32, CPU)
    found = measure_costs(model, cache, 3, 64, None)
    assert found.rows == (1, 2, 3)
    assert min(found.steps) > 0
    assert len(found.micro_steps) == 3
