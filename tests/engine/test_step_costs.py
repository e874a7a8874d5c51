"""What is measured of steps when an engine with verified groups starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hamburger.engine.device import step_costs as module
from hamburger.engine.device.step_costs import measure_costs
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from small_models import CPU, graft_config, random_model, trunk_config


class SlowFirst:
    """The first step of each kind takes long, as where kernels are compiled."""

    def __init__(self) -> None:
        self.config, self.device = ModelConfig(trunk=trunk_config(), graft=graft_config()), CPU
        self.seen: set[tuple[int, int, int]] = set()
        self.contexts: list[int] = []  # of the last step of each kind

    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        assert batch.checks is not None
        kind = len(batch.emit), batch.max_group_limit, int((batch.checks >= 0).sum())
        if kind not in self.seen:
            time.sleep(0.05)
        self.seen.add(kind)
        self.contexts = batch.context_slots.tolist()
        zeros = torch.zeros(len(batch.emit), 1)
        return StepOutput(zeros.long(), zeros, zeros, None)


def test_what_happens_once_does_not_count() -> None:
    cache = PagedKVCache(trunk_config(), 64, 4, torch.float32, CPU)
    steps = SlowFirst()
    found = measure_costs(steps, cache, 22, 64, None)  # type: ignore[arg-type]
    assert found.rows == (1, 2, 3, 4, 6, 8, 9, 12, 16, 17)  # the kernels' eight, and one more
    assert max(found.steps) < 40
    assert {limit for _, limit, _ in steps.seen} == {1, 4}
    # Rows that follow each other are joined, four at most.
    assert {(rows, joined) for rows, limit, joined in steps.seen if limit == 1 and rows == 8} == {(8, 0), (8, 6)}


def test_rows_are_measured_in_a_context() -> None:
    steps = SlowFirst()
    measure_costs(steps, PagedKVCache(trunk_config(), 20, 16, torch.float32, CPU), 32, 1024, None)  # type: ignore[arg-type]
    assert 180 <= min(steps.contexts) <= max(steps.contexts) <= 256
    # As far as model and pool allow.
    measure_costs(steps, PagedKVCache(trunk_config(), 6, 16, torch.float32, CPU), 4, 1024, None)  # type: ignore[arg-type]
    assert 60 <= max(steps.contexts) <= 96
    measure_costs(steps, PagedKVCache(trunk_config(), 20, 16, torch.float32, CPU), 4, 100, None)  # type: ignore[arg-type]
    assert 60 <= max(steps.contexts) <= 100


class AlwaysSlow(SlowFirst):
    """As without kernels."""

    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        time.sleep(0.015)
        return super().step(batch, cache)


def test_fewer_rows_are_measured_where_steps_are_slow() -> None:
    cache = PagedKVCache(trunk_config(), 64, 4, torch.float32, CPU)
    found = measure_costs(AlwaysSlow(), cache, 22, 64, None)  # type: ignore[arg-type]
    assert found.rows == (1, 2, 4, 8, 16)


class LosingThreads:
    """Two, and one from the 50th step on."""

    is_undecided = False

    def __init__(self) -> None:
        self.taken, self._num_steps = 2, 0

    @contextmanager
    def step(self, *, decodes: bool) -> Iterator[None]:
        self._num_steps += 1
        self.taken = 2 if self._num_steps < 50 else 1
        yield


class StepsOfThreads:
    """One thread takes four times as long as two."""

    def __init__(self, threads: LosingThreads) -> None:
        self.config, self.device, self._threads = ModelConfig(trunk=trunk_config()), CPU, threads

    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        time.sleep(0.004 if self._threads.taken == 1 else 0.001)
        zeros = torch.zeros(len(batch.emit), 1)
        return StepOutput(zeros.long(), zeros, zeros, None)


def test_all_rows_are_measured_at_one_number_of_threads() -> None:
    cache = PagedKVCache(trunk_config(), 64, 4, torch.float32, CPU)
    threads = LosingThreads()
    found = measure_costs(StepsOfThreads(threads), cache, 4, 64, threads)  # type: ignore[arg-type]
    assert min(found.steps) >= 4.0


class UndecidedThreads(LosingThreads):
    """One and two by turns until the 100th step; then one."""

    @property
    def is_undecided(self) -> bool:  # type: ignore[override]
        return self._num_steps < 100

    @contextmanager
    def step(self, *, decodes: bool) -> Iterator[None]:
        self._num_steps += 1
        self.taken = 1 + self._num_steps % 2 if self._num_steps < 100 else 1
        yield


def test_the_number_of_threads_is_decided_before_all_is_measured_once() -> None:
    threads, cache = UndecidedThreads(), PagedKVCache(trunk_config(), 64, 4, torch.float32, CPU)
    steps = StepsOfThreads(threads)
    found = measure_costs(steps, cache, 4, 64, threads)  # type: ignore[arg-type]
    assert min(found.steps) >= 4.0
    assert 100 < threads._num_steps < 140  # four batches, of which each has a step that warms up and seven


def test_micro_steps_between_those_that_are_measured_are_on_a_line() -> None:
    cache = PagedKVCache(trunk_config(), 64, 4, torch.float32, CPU)
    steps = SlowFirst()
    found = measure_costs(steps, cache, 22, 64, None)  # type: ignore[arg-type]
    assert {rows for rows, limit, _ in steps.seen if limit > 1} == {1, 2, 4, 8, 16, 17}
    at = dict(zip(found.rows, found.micro_steps, strict=True))
    assert at[6] == pytest.approx((at[4] + at[8]) / 2)
    assert at[12] == pytest.approx((at[8] + at[16]) / 2)


class RestlessThreads(LosingThreads):
    """Another number in every step."""

    @contextmanager
    def step(self, *, decodes: bool) -> Iterator[None]:
        self._num_steps += 1
        self.taken = 1 + self._num_steps % 2
        yield


def test_on_a_busy_machine_there_is_an_end_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_steps(most_seconds: float) -> int:
        monkeypatch.setattr(module, "_MOST_SECONDS", most_seconds)
        threads, cache = RestlessThreads(), PagedKVCache(trunk_config(), 64, 4, torch.float32, CPU)
        measure_costs(StepsOfThreads(threads), cache, 4, 64, threads)  # type: ignore[arg-type]
        return threads._num_steps

    assert num_steps(0.0) < num_steps(1000.0) / 1.5


def test_real_steps_are_measured_with_drafts_and_without() -> None:
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()))
    cache = PagedKVCache(model.config.trunk, 64, 4, torch.float32, CPU)
    found = measure_costs(model, cache, 3, 64, None)
    assert found.rows == (1, 2, 3)
    assert min(found.steps) > 0
    assert len(found.micro_steps) == 3
