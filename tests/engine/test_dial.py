"""ConfidenceDial on simulated machines: in its bounds, at rest once it holds the target, at the default elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fakes import fake_config, fake_info
from hamburger.engine import dial as module
from hamburger.engine.dial import AutoConfidence, ConfidenceDial, DialRow, DialStep, levels_between
from hamburger.engine.time_per_token import MIN_STEPS, PAIRED_SECONDS, TimePerToken
from hamburger.model.config import ConfigError

ANSWER_TOKENS = 40
# Nothing of a simulation is learnt from shrinking it.
quick = settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])


def helps(confidence: float) -> float:
    """Time per token over that at 0.8: each tenth takes 15 % off."""
    return float(0.85 ** (10 * (0.8 - confidence)))


def harms(confidence: float) -> float:
    return 1 + (0.8 - confidence)


def changes_nothing(confidence: float) -> float:
    return 1.0


@dataclass
class Plant:
    """A server with a fixed number of answers running, each of which keeps the confidence that it began with.

    A step takes 40 ms and 4 ms a row at 0.8; `tpot` says what becomes of the time per token below it. A lower
    confidence gives larger groups and longer steps. noise: the step time varies by so much. pinned: rows of answers
    that the dial has no say in.
    """

    dial: ConfidenceDial
    tpot: Callable[[float], float]
    noise: float = 0.0
    pinned: int = 0
    seed: int = 0
    now: float = 100.0
    seen: list[float] = field(default_factory=list)  # the value in force after each step
    _answers: list[list[float]] = field(default_factory=list)  # confidence, tokens, end of its last step, rest

    def run(self, seconds: float, rows: int) -> None:
        draw = random.Random(self.seed + int(self.now))
        end = self.now + seconds
        while self.now < end:
            while len(self._answers) < rows:
                begun = draw.randrange(ANSWER_TOKENS) if not self.seen else 0  # so that they do not all end at once
                self._answers.append([self.dial.confidence(self.now), begun, float("nan"), draw.random()])
            del self._answers[rows:]
            sizes = [1 + (0.8 - confidence) for confidence, *_ in self._answers]
            mean = sum(sizes) / rows
            factor = sum(map(self.tpot, (c for c, *_ in self._answers))) / rows
            seconds_a_step = (0.04 + 0.004 * rows) * factor * mean * draw.uniform(1 - self.noise, 1 + self.noise)
            self.now += seconds_a_step
            groups = []
            for answer, size in zip(self._answers, sizes, strict=True):
                answer[3] += size
                whole = int(answer[3])
                answer[3] -= whole
                gap = None if answer[2] != answer[2] else self.now - answer[2]
                groups.append(DialRow(answer[0], gap, whole))
                answer[1] += whole
                answer[2] = self.now
            tokens = sum(row.num_tokens for row in groups)
            total = rows + self.pinned
            step = DialStep(self.now, seconds_a_step, 0, total, tokens + self.pinned, groups)
            self.dial.observe(step)
            self._answers = [answer for answer in self._answers if answer[1] < ANSWER_TOKENS]
            self.seen.append(self.dial.confidence(self.now))

    def felt(self, rows: int, confidence: float) -> float:
        """The time per token once all answers run at a confidence."""
        return (0.04 + 0.004 * rows) * self.tpot(confidence)

    @property
    def moves(self) -> list[float]:
        """Each change of the value in force."""
        return [b - a for a, b in zip(self.seen, self.seen[1:], strict=False) if a != b]


def plant(tpot: Callable[[float], float], target: float, **options: float) -> Plant:
    return Plant(ConfidenceDial(0.5, 0.8, target), tpot, **options)  # type: ignore[arg-type]


# Bounds


@pytest.mark.parametrize(
    ("low", "high", "levels"),
    [
        (0.6, 0.8, (0.8, 0.7, 0.6)),
        (0.5, 0.8, (0.8, 0.7, 0.6, 0.5)),
        (0.75, 0.8, (0.8, 0.75)),
        (0.0, 0.25, (0.25, 0.1667, 0.0833, 0.0)),
        (0.9, 1.0, (1.0, 0.9)),
    ],
)
def test_levels_are_equal_steps_between_the_bounds(low: float, high: float, levels: tuple[float, ...]) -> None:
    assert levels_between(low, high) == levels


rows = st.builds(DialRow, st.just(0.0), st.none() | st.floats(1e-6, 100), st.integers(1, 4))


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1e-4, 10),
    st.lists(st.tuples(st.floats(0, 400), st.floats(0, 5), st.integers(0, 9), st.lists(rows, max_size=9)), max_size=40),
    st.randoms(use_true_random=False),
)
def test_whatever_it_is_told_it_stays_in_its_bounds_and_moves_by_one_level(
    a: float, b: float, target: float, steps: list[tuple[float, float, int, list[DialRow]]], draw: random.Random
) -> None:
    low, high = min(a, b), max(a, b)
    if low == high:
        return
    dial = ConfidenceDial(low, high, target)
    assert dial.levels[0] == high
    assert dial.levels[-1] == low
    assert all(0 < x - y <= module.LARGEST_STEP + 1e-3 for x, y in zip(dial.levels, dial.levels[1:], strict=False))
    now = 0.0
    for gap, seconds, prompt_slots, found in steps:
        now += gap
        before = dial.levels.index(dial.confidence(now))
        told = [DialRow(draw.choice(dial.levels), row.gap_seconds, row.num_tokens) for row in found]
        tokens = sum(row.num_tokens for row in told)
        dial.observe(DialStep(now, seconds, prompt_slots, len(told), tokens, told))
        after = dial.confidence(now)
        assert low <= after <= high
        assert abs(dial.levels.index(after) - before) <= 1
    assert dial.confidence(now + 10 * module.IDLE_SECONDS * len(dial.levels)) == high


# A machine where it pays


@quick
@given(st.integers(2, 12), st.sampled_from([0.7, 0.6, 0.5]), st.floats(0, 0.03), st.integers(0, 99))
def test_it_goes_straight_to_the_confidence_that_holds_the_target_and_rests_there(
    load: int, wanted: float, noise: float, seed: int
) -> None:
    """The target lies in the middle between what `wanted` takes and what the level above it takes."""
    found = plant(helps, 0, noise=noise, seed=seed)
    found.dial.target_seconds = (found.felt(load, wanted) + found.felt(load, wanted + 0.1)) / 2
    found.run(120, load)
    assert found.moves == [pytest.approx(-0.1)] * round(10 * (0.8 - wanted))
    assert found.seen[-1] == wanted


def test_a_target_that_cannot_be_held_leaves_it_at_the_lower_bound() -> None:
    found = plant(helps, 0.001)
    found.run(120, 8)
    assert set(found.seen[-100:]) == {0.5}
    assert len(found.moves) == 3


def test_a_load_within_the_target_leaves_it_at_the_default() -> None:
    found = plant(helps, 1.0)
    found.run(60, 8)
    assert found.moves == []


@quick
@given(st.sampled_from([0.93, 0.79, 0.66]), st.integers(0, 99))
def test_it_recovers_when_the_load_falls(share: float, seed: int) -> None:
    found = plant(helps, 0, seed=seed)
    found.dial.target_seconds = share * found.felt(12, 0.8)
    found.run(120, 12)
    assert found.seen[-1] < 0.8
    assert found.felt(1, 0.8) < found.dial.target_seconds * (1 - module.MARGIN)
    found.run(60, 1)
    assert found.seen[-1] == 0.8
    moves = len(found.moves)
    found.run(60, 12)  # what has paid once is taken again at once
    assert len(found.moves) > moves
    assert found.moves[moves] < 0


def test_idle_time_turns_it_back_level_by_level() -> None:
    found = plant(helps, 0.001)
    found.run(120, 8)
    end = found.now
    values = [found.dial.confidence(end + module.IDLE_SECONDS * i + 0.01) for i in range(5)]
    assert values == [0.5, 0.6, 0.7, 0.8, 0.8]


def test_a_long_step_is_no_idle_time() -> None:
    found = plant(helps, 0.001)
    found.run(120, 8)
    long = 10 * module.IDLE_SECONDS
    found.dial.observe(DialStep(found.now + long, long - 0.1, 500, 1, 1, [DialRow(0.5, long, 1)]))
    assert found.dial.confidence(found.now + long) == 0.5


def test_a_burst_after_hours_begins_at_the_default() -> None:
    found = plant(helps, 0.001)
    found.run(120, 8)
    found.now += 7200
    assert found.dial.confidence(found.now) == 0.8


# A machine where it does not


@quick
@given(st.sampled_from([harms, changes_nothing]), st.integers(1, 12), st.floats(0, 0.02), st.integers(0, 99))
def test_where_a_lower_confidence_does_not_help_it_goes_back_and_tries_ever_less(
    tpot: Callable[[float], float], load: int, noise: float, seed: int
) -> None:
    found = plant(tpot, 1e-6, noise=noise, seed=seed)
    found.run(400, load)
    assert min(found.seen) == 0.7  # one level is tried, never a second below one that did not pay
    down = [i for i, (a, b) in enumerate(zip(found.seen, found.seen[1:], strict=False)) if b < a]
    assert 1 <= len(down) <= 3  # after 60 s, 120 s, 240 s
    assert found.seen.count(0.8) > 0.75 * len(found.seen)


def test_where_others_name_their_confidence_nothing_can_be_shown_and_it_goes_back() -> None:
    """Half of the rows are not the dial's: no step tells of one confidence, and so no lower one is ever tried."""
    found = plant(helps, 0.001, pinned=8)
    found.run(200, 8)
    assert found.moves == []


def test_a_trial_that_shows_nothing_ends() -> None:
    """The load of the trial is one that the default was never measured at."""
    found = plant(helps, 0.001)
    found.run(4, 2)
    assert found.seen[-1] == 0.7
    found.run(module.TRIAL_SECONDS + 20, 12)
    assert found.seen.count(0.5) == found.seen.count(0.6) == 0
    assert found.seen[-1] == 0.8


def test_steps_with_prompts_are_felt_but_tell_nothing_of_a_confidence() -> None:
    dial = ConfidenceDial(0.6, 0.8, 0.01)
    for i in range(10 * MIN_STEPS):
        group = [DialRow(0.8, 0.1, 1)] * 4
        dial.observe(DialStep(i / 10, 0.1, 100, 4, 4, group))
    assert dial.confidence(MIN_STEPS) == 0.8  # far above the target, but nothing could be compared


# What was measured


def test_only_like_loads_of_the_same_minutes_are_compared() -> None:
    measured = TimePerToken()
    for i in range(2 * MIN_STEPS):
        measured.add(0, i / 10, 0.02, 4, 4)
        measured.add(1, i / 10, 0.03, 4, 6)
        measured.add(1, i / 10, 9.0, 32, 32)  # another load, another time
    assert measured.ratio(1, 0, 4) == pytest.approx(1.0)
    assert measured.ratio(1, 0, 32) is None
    for i in range(2 * MIN_STEPS):
        measured.add(1, PAIRED_SECONDS + 10 + i, 0.03, 4, 6)
    assert measured.ratio(1, 0, 4) is None
    assert not measured.is_known(0, 4, PAIRED_SECONDS + 20)
    assert measured.is_known(1, 4, PAIRED_SECONDS + 10)
    measured.forget(1)
    assert not measured.is_known(1, 4, PAIRED_SECONDS + 10)


def test_one_stalled_step_hardly_counts_and_old_steps_fade() -> None:
    measured = TimePerToken()
    for i in range(400):
        measured.add(0, i / 100, 0.02, 8, 8)
        measured.add(1, i / 100, 2.0 if i == 200 else 0.02, 8, 8)
    assert measured.ratio(1, 0, 8) == pytest.approx(1.0, abs=0.02)
    for i in range(4000):
        measured.add(1, 4 + i / 100, 0.01, 8, 8)
    assert measured.ratio(1, 0, 8) == pytest.approx(0.5, abs=0.01)


# What the operator asks for


def test_bounds_come_from_the_operator_or_the_checkpoint() -> None:
    info = fake_info(fake_config())
    assert AutoConfidence(target_seconds=1).dial(info).levels == (0.8, 0.7, 0.6)
    assert AutoConfidence(target_seconds=1, min_confidence=0.75).dial(info).levels == (0.8, 0.75)
    low = fake_info(fake_config(), default_confidence=0.15)
    assert AutoConfidence(target_seconds=1).dial(low).levels == (0.15, 0.075, 0.0)


def test_a_plain_base_and_bounds_that_cross_are_refused() -> None:
    plain = fake_info(fake_config(max_group=1), default_confidence=1.0, model="smol")
    with pytest.raises(ConfigError, match="confidence is auto, but smol is a plain base model"):
        AutoConfidence(target_seconds=1).dial(plain)
    with pytest.raises(ConfigError, match=r"min_confidence is 0.8: it must be below 0.8"):
        AutoConfidence(target_seconds=1, min_confidence=0.8).dial(fake_info(fake_config()))
