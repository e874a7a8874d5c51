"""Bootstrap intervals: what must hold for any numbers, and that they cover as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamburger.training.statistics import Ratio, difference, quotient, ratio, resample

numbers = st.floats(-1e6, 1e6, allow_nan=False)
counts = st.integers(1, 1000)
pairs = st.lists(st.tuples(numbers, counts), min_size=1, max_size=30)


def ratio_of(rows: list[tuple[float, int]]) -> Ratio:
    return Ratio([n for n, _ in rows], [d for _, d in rows])


@given(pairs, st.integers(0, 2**32))
def test_same_seed_same_interval_within_the_extremes(rows: list[tuple[float, int]], seed: int) -> None:
    draws = resample([0] * len(rows), 50, seed)
    first = ratio(ratio_of(rows), draws)
    assert first == ratio(ratio_of(rows), resample([0] * len(rows), 50, seed))
    assert first.value == pytest.approx(sum(n for n, _ in rows) / sum(d for _, d in rows), abs=1e-6)
    single = [n / d for n, d in rows]
    assert min(single) - 1e-6 <= first.low <= first.high <= max(single) + 1e-6


@given(pairs, st.floats(-100, 100))
def test_a_constant_shift_is_seen_exactly(rows: list[tuple[float, int]], shift: float) -> None:
    # Only a paired draw gives an interval of no width here.
    a, b = ratio_of([(n + shift * d, d) for n, d in rows]), ratio_of(rows)
    found = difference(a, b, resample([0] * len(rows), 50, 0))
    assert [found.value, found.low, found.high] == pytest.approx([shift] * 3, abs=1e-6)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=30), st.floats(0.1, 10))
def test_a_constant_factor_is_seen_exactly(rows: list[tuple[int, int]], factor: float) -> None:
    a, b = Ratio([n * factor for n, _ in rows], [d for _, d in rows]), ratio_of([(float(n), d) for n, d in rows])
    found = quotient(a, b, resample([0] * len(rows), 50, 0))
    assert [found.value, found.low, found.high] == pytest.approx([factor] * 3)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(0, 1000))
def test_each_stratum_keeps_its_size(strata: list[str], seed: int) -> None:
    draws = resample(strata, 7, seed)
    assert draws.shape == (7, len(strata))
    for row in draws:
        assert sorted(strata[i] for i in row) == sorted(strata)


def test_a_wider_level_is_a_wider_interval() -> None:
    values = np.random.default_rng(0).normal(size=60)
    draws = resample([0] * 60, 500, 0)
    narrow, wide = (ratio(Ratio(values, np.ones(60)), draws, level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_it_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for trial in range(300):
        prompts = generator.normal(size=60)  # how hard each prompt is: common to both sides
        a, b = (Ratio(prompts + generator.normal(m, 0.3, 60), np.ones(60)) for m in (0.1, 0.0))
        found = difference(a, b, resample([0] * 60, 300, trial))
        hits += found.low <= 0.1 <= found.high
        assert found.high - found.low < 0.35  # unpaired it would be about 0.7
    assert 0.9 <= hits / 300 <= 0.98


def test_a_zero_denominator_gives_no_number() -> None:
    draws = resample([0, 0], 20, 0)
    zero, one = Ratio([0, 0], [1, 1]), Ratio([1, 1], [1, 1])
    assert all(map(math.isnan, vars_of(quotient(one, zero, draws))))
    assert vars_of(quotient(zero, one, draws)) == [0, 0, 0]
    some = ratio(Ratio([1, 0], [1, 0]), draws)  # draws without the first prompt give no number
    assert vars_of(some) == [1, 1, 1]


def vars_of(interval: object) -> list[float]:
    return [getattr(interval, name) for name in ("value", "low", "high")]


def test_what_cannot_be_reckoned_is_named() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        resample([], 10, 0)
    with pytest.raises(ValueError, match="0 rounds"):
        resample([0], 0, 0)
    with pytest.raises(ValueError, match="one entry a prompt"):
        Ratio([1, 2], [1])
    with pytest.raises(ValueError, match="finite"):
        Ratio([math.nan], [1])
    one, two = Ratio([1], [1]), Ratio([1, 2], [1, 1])
    for compare in (difference, quotient):
        with pytest.raises(ValueError, match="cannot be paired"):
            compare(one, two, resample([0], 5, 0))
    with pytest.raises(ValueError, match="level"):
        ratio(one, resample([0], 5, 0), 95)
