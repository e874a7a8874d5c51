"""Bootstrap intervals: their laws, and cases that are known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hamburger.clients.evaluation.bootstrap import Interval, bootstrap_mean, paired_bootstrap
from hamburger.clients.evaluation.errors import EvalError

SCORES = st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), min_size=1, max_size=12)


def both(pairs: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    return [float(x) for x, _ in pairs], [float(y) for _, y in pairs]


@settings(max_examples=60)
@given(SCORES, st.integers(0, 5), st.sampled_from([0.5, 0.9, 0.95]))
def test_laws_of_a_paired_interval(pairs: list[tuple[int, int]], seed: int, level: float) -> None:
    a, b = both(pairs)
    found = paired_bootstrap(a, b, samples=200, seed=seed, level=level)
    differences = [x - y for x, y in pairs]
    assert found.value == pytest.approx(sum(differences) / len(pairs))
    assert min(differences) - 1e-9 <= found.low <= found.high <= max(differences) + 1e-9
    assert found == paired_bootstrap(a, b, samples=200, seed=seed, level=level)
    swapped = paired_bootstrap(b, a, samples=200, seed=seed, level=level)
    assert (swapped.value, swapped.low, swapped.high) == pytest.approx((-found.value, -found.high, -found.low))
    moved = paired_bootstrap([x + 3 for x in a], [y + 3 for y in b], samples=200, seed=seed, level=level)
    assert moved == found


@settings(max_examples=30)
@given(SCORES)
def test_a_higher_level_gives_a_wider_interval(pairs: list[tuple[int, int]]) -> None:
    a, b = both(pairs)
    narrow, wide = (paired_bootstrap(a, b, samples=200, level=level) for level in (0.5, 0.95))
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


def test_equal_series_differ_by_nothing_and_a_constant_difference_has_no_width() -> None:
    a = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert paired_bootstrap(a, a) == Interval(0, 0, 0)
    assert paired_bootstrap([x + 0.5 for x in a], a) == Interval(0.5, 0.5, 0.5)


def test_two_items_are_known_exactly() -> None:
    """The mean of 2 draws of {0, 1} is 0, 0.5 or 1 with chances 1/4, 1/2, 1/4."""
    assert bootstrap_mean([0, 1], level=0.95) == Interval(0.5, 0.0, 1.0)
    assert bootstrap_mean([0, 1], level=0.4) == Interval(0.5, 0.5, 0.5)


def test_a_large_sample_has_the_normal_interval() -> None:
    draw = random.Random(1)
    b = [draw.gauss(0, 5) for _ in range(400)]
    noise = [draw.gauss(0.3, 1) for _ in range(400)]
    found = paired_bootstrap([x + d for x, d in zip(b, noise, strict=True)], b)
    mean = sum(noise) / 400
    error = math.sqrt(sum((d - mean) ** 2 for d in noise) / 400) / 20
    assert found.value == pytest.approx(mean)
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def test_seeds_matter_and_many_items_take_several_parts() -> None:
    values = [float(i % 3) for i in range(30_000)]
    first, second = (bootstrap_mean(values, samples=150, seed=seed) for seed in (1, 2))
    assert first.value == second.value == pytest.approx(1.0)
    assert first.low != second.low
    assert first.high - first.low == pytest.approx(2 * 1.96 * math.sqrt(2 / 3 / 30_000), rel=0.35)


def test_wrong_input_is_named_with_its_remedy() -> None:
    with pytest.raises(EvalError, match="a has 2 scores and b has 1: pair them"):
        paired_bootstrap([1, 2], [1])
    with pytest.raises(EvalError, match="at least one item"):
        bootstrap_mean([])
    with pytest.raises(EvalError, match="NaN or infinity"):
        bootstrap_mean([1, math.nan])
    with pytest.raises(EvalError, match=r"samples is 0.*from 1 up"):
        bootstrap_mean([1], samples=0)
    with pytest.raises(EvalError, match=r"level is 95.*0\.95"):
        bootstrap_mean([1], level=95)
