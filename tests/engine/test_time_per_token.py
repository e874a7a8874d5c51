"""TimePerToken: what a further token costs, read off steps."""

from __future__ import annotations

import random

import pytest

from hamburger.engine.dial.time_per_token import MIN_GROUPS, MIN_STEPS, TimePerToken


def shown(measured: TimePerToken, seconds: float, rows: int, most: int, cost: float = 0.5, times: int = 600) -> None:
    """Steps of `rows` to `most` tokens in any order. A further token a row adds `cost` of a step of single ones: three
    quarters at once, the rest to the next step."""
    draw, last = random.Random(rows), 0.0
    for _ in range(times):
        tokens = draw.randint(rows, most)
        extra = tokens / rows - 1
        measured.add_step(seconds * (1 + cost * (0.75 * extra + 0.25 * last)), rows, tokens)
        last = extra


def count(measured: TimePerToken, *sizes: int) -> None:
    """Groups at the levels 0, 1, ..., all of one size."""
    for level, size in enumerate(sizes):
        for _ in range(2 * MIN_GROUPS):
            measured.add_group(level, size)


def test_what_further_tokens_cost_is_read_off_steps_that_have_more_of_them() -> None:
    measured = TimePerToken()
    count(measured, 1, 2, 4)
    assert measured.ratio(1, 0, 8) is None
    shown(measured, 0.02, 8, 24)
    shown(measured, 0.09, 9, 27)  # steps of other loads have other times and the same cost
    assert measured.ratio(1, 0, 8) == pytest.approx(1.5 / 2, rel=0.02)
    assert measured.ratio(2, 0, 8) == pytest.approx(2.5 / 4, rel=0.03)
    assert measured.ratio(2, 1, 8) == pytest.approx(2.5 / 4 / (1.5 / 2), rel=0.02)
    assert measured.is_known(1, 8)
    measured.forget(1)
    assert not measured.is_known(1, 8)
    assert measured.ratio(1, 0, 8) is None


def test_evidence_of_a_far_load_counts_only_where_there_is_none_nearer() -> None:
    measured = TimePerToken()
    count(measured, 1, 2)
    shown(measured, 0.02, 4, 12)
    assert measured.ratio(1, 0, 16) == pytest.approx(1.5 / 2, rel=0.02)
    assert measured.ratio(1, 0, 64) is None
    shown(measured, 0.02, 16, 48, cost=1.0)
    assert measured.ratio(1, 0, 16) == pytest.approx(1, rel=0.02)


def test_noise_that_hides_the_answer_is_no_answer() -> None:
    measured, draw = TimePerToken(), random.Random(0)
    count(measured, 1, 2)
    for _ in range(MIN_STEPS + 1):
        measured.add_step(0.02 * draw.uniform(0.3, 2), 8, draw.randint(8, 9))
    assert measured.ratio(1, 0, 8) is None
    shown(measured, 0.02, 8, 24, times=2000)
    assert measured.ratio(1, 0, 8) == pytest.approx(1.5 / 2, abs=0.05)


def test_one_stalled_step_hardly_counts_and_old_steps_fade() -> None:
    measured = TimePerToken()
    count(measured, 1, 2)
    shown(measured, 0.02, 8, 24)
    measured.add_step(5.0, 8, 24)
    assert measured.ratio(1, 0, 8) == pytest.approx(1.5 / 2, abs=0.03)
    shown(measured, 0.02, 8, 24, cost=0.0, times=10_000)
    assert measured.ratio(1, 0, 8) == pytest.approx(1 / 2, abs=0.01)


def test_steps_with_prompts_are_not_timed() -> None:
    measured = TimePerToken()
    count(measured, 1, 2)
    for i in range(2 * MIN_STEPS):
        measured.add_step(0.02, 8, 8 + i % 3, is_timed=False)
    assert not measured.is_known(0, 8)
    assert measured.ratio(1, 0, 8) is None
