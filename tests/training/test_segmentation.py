"""The four ways to segment, against the numbers of the published implementation and by what must always hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamburger.training.corpus.segmentation import STRATEGIES, Strategy, peak_entropy, segment
from hamburger.training.errors import TrainingError

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "golden-tiny" / "golden.json").read_text()
)["segment"]
_ENTROPIES = st.lists(st.floats(0, 12), max_size=60)
_STRATEGIES = st.sampled_from(STRATEGIES)
_GROUPS = st.integers(1, 6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_golden_tiny(strategy: Strategy) -> None:
    assert len(GOLDEN) == 12
    for case in GOLDEN:
        assert segment(case["values"], strategy) == case[strategy]


def test_the_lines_are_the_published_constants() -> None:
    assert peak_entropy(0.7, 128256) == pytest.approx(4.1394, abs=5e-5)
    assert peak_entropy(0.95, 128256) == pytest.approx(0.7866, abs=5e-5)
    assert peak_entropy(0.5, 2) == pytest.approx(math.log(2))


@given(_ENTROPIES, _STRATEGIES, _GROUPS, st.floats(0, 1), st.floats(0, 2))
def test_groups_tile_the_answer(
    entropies: list[float], strategy: Strategy, max_group: int, ratio: float, floor: float
) -> None:
    sizes = segment(entropies, strategy, max_group, ratio, floor)
    assert sum(sizes) == len(entropies)
    assert all(1 <= size <= max_group for size in sizes)


@given(_ENTROPIES, _STRATEGIES, _GROUPS, st.data())
def test_a_group_does_not_depend_on_what_comes_later(
    entropies: list[float], strategy: Strategy, max_group: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(entropies)))
    whole, part = (segment(e, strategy, max_group) for e in (entropies, entropies[:cut]))
    assert whole[: max(len(part) - 1, 0)] == part[:-1]


@given(_ENTROPIES, st.floats(0, 1), st.floats(0, 2))
def test_every_decreasing_group_has_its_reason(entropies: list[float], ratio: float, floor: float) -> None:
    at = 0
    for size in segment(entropies, "decreasing_v2", 4, ratio, floor):
        group = entropies[at : at + size]
        assert all(e < floor or e < ratio * max(group[:i]) for i, e in enumerate(group) if i)
        at += size
        if at < len(entropies) and size < 4:  # it ended because the next token must not join
            assert entropies[at] >= max(floor, ratio * max(group))


@given(_ENTROPIES, _GROUPS)
def test_without_floor_the_two_decreasing_are_one(entropies: list[float], max_group: int) -> None:
    assert segment(entropies, "decreasing", max_group) == segment(entropies, "decreasing_v2", max_group, floor=0)


def test_a_small_vocabulary_draws_lower_lines() -> None:
    assert segment([3.0, 3.0], "sliding") == [2]
    assert segment([3.0, 3.0], "sliding", vocab_size=100) == [1, 1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"strategy": "best"}, "strategy"),
        ({"max_group": 0}, "max_group"),
        ({"max_group": 256}, "max_group"),
        ({"ratio": -0.1}, "ratio"),
        ({"ratio": math.nan}, "ratio"),
        ({"floor": -1.0}, "floor"),
        ({"floor": math.inf}, "floor"),
        ({"strategy": "sliding", "vocab_size": 1}, "vocab_size"),
    ],
)
def test_settings_without_meaning_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(TrainingError, match=f"{field} is"):
        segment([1.0], **changes)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_entropy_is_no_group(value: float) -> None:
    with pytest.raises(TrainingError, match="not finite"):
        segment([1.0, value])
