"""ConfidenceDial on simulated machines: in its bounds, at rest once it holds the target, at the default elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fake_engines import fake_config, fake_info
from hamburger.engine.dial import confidence_dial as module
from hamburger.engine.dial.confidence_dial import AutoConfidence, ConfidenceDial, DialRow, DialStep, levels_between
from hamburger.engine.dial.time_per_token import MIN_STEPS
from hamburger.model.config import ConfigError

ANSWER_TOKENS = 40
# Nothing of a simulation is learnt from shrinking it. Under noise the dial is wrong once in some hundred times, so the
# examples are always the same ones.
quick = settings(max_examples=8, derandomize=True, phases=[Phase.explicit, Phase.generate])
pytestmark = pytest.mark.no_cover  # which would take five times as long; other tests run the same lines


# What one more token a row adds to a step of single tokens, as a share of it.
HELPS, HARMS, CHANGES_NOTHING = 0.1, 1.5, 1.0


def mean_group(confidence: float) -> float:
    return 1 + 2 * (0.8 - confidence)


@dataclass
class Plant:
    """A server with a fixed number of answers running, each of which keeps the confidence that it began with.

    A step of single tokens takes 40 ms and 4 ms a row; `cost` of that is what one more token a row adds. noise: the
    step time varies by so much. pinned: rows of answers that the dial has no say in, of one token each. prompts:
    whether each step computes a prompt as well. regular: each answer's groups come near to their mean as fast as they
    can; else their sizes are drawn. slowness: of the machine, by the time.
    """

    dial: ConfidenceDial
    cost: float
    noise: float = 0.0
    pinned: int = 0
    seed: int = 0
    prompts: bool = False
    regular: bool = True
    slowness: Callable[[float], float] = lambda now: 1.0
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
            sizes = []
            for answer in self._answers:
                answer[3] = mean_group(answer[0]) + (answer[3] if self.regular else draw.random())
                sizes.append(int(answer[3]))
                answer[3] -= sizes[-1]
            total, tokens = rows + self.pinned, sum(sizes) + self.pinned
            seconds_a_step = (0.04 + 0.004 * rows) * (1 + self.cost * (tokens / total - 1))
            seconds_a_step *= self.slowness(self.now) * draw.uniform(1 - self.noise, 1 + self.noise)
            self.now += seconds_a_step
            groups = []
            for answer, size in zip(self._answers, sizes, strict=True):
                gap = None if answer[2] != answer[2] else self.now - answer[2]
                groups.append(DialRow(answer[0], gap, size))
                answer[1] += size
                answer[2] = self.now
            self.dial.observe(DialStep(self.now, seconds_a_step, 100 * self.prompts, total, tokens, groups))
            self._answers = [answer for answer in self._answers if answer[1] < ANSWER_TOKENS]
            self.seen.append(self.dial.confidence(self.now))

    def felt(self, rows: int, confidence: float) -> float:
        """The time per token once all answers run at a confidence."""
        size = mean_group(confidence)
        return (0.04 + 0.004 * rows) * (1 + self.cost * (size - 1)) / size

    @property
    def moves(self) -> list[float]:
        """Each change of the value in force."""
        return [b - a for a, b in zip(self.seen, self.seen[1:], strict=False) if a != b]


def plant(cost: float, target: float, **options: float) -> Plant:
    return Plant(ConfidenceDial(0.5, 0.8, target), cost, **options)  # type: ignore[arg-type]


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
def test_whatever_it_is_told_it_stays_in_its_bounds(
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
        told = [DialRow(draw.choice(dial.levels), row.gap_seconds, row.num_tokens) for row in found]
        tokens = sum(row.num_tokens for row in told)
        dial.observe(DialStep(now, seconds, prompt_slots, len(told), tokens, told))
        assert dial.confidence(now) in dial.levels
    assert dial.confidence(now + 10 * module.IDLE_SECONDS * len(dial.levels)) == high


# A machine where it pays


@quick
@given(st.integers(2, 12), st.sampled_from([0.7, 0.6, 0.5]), st.floats(0, 0.03), st.integers(0, 99))
def test_it_goes_straight_to_the_confidence_that_holds_the_target_and_rests_there(
    load: int, wanted: float, noise: float, seed: int
) -> None:
    """The target lies in the middle between what `wanted` takes and what the level above it takes."""
    found = plant(HELPS, 0, noise=noise, seed=seed)
    found.dial.target_seconds = (found.felt(load, wanted) + found.felt(load, wanted + 0.1)) / 2
    found.run(120, load)
    assert found.moves == [pytest.approx(-0.1)] * round(10 * (0.8 - wanted))
    assert found.seen[-1] == wanted


def test_a_target_that_cannot_be_held_leaves_it_at_the_lower_bound() -> None:
    found = plant(HELPS, 0.001)
    found.run(120, 8)
    assert set(found.seen[-100:]) == {0.5}
    assert len(found.moves) == 3


def test_a_load_within_the_target_leaves_it_at_the_default() -> None:
    found = plant(HELPS, 1.0)
    found.run(60, 8)
    assert found.moves == []


@quick
@given(st.sampled_from([0.93, 0.79, 0.66]), st.integers(0, 99))
def test_it_recovers_when_the_load_falls(share: float, seed: int) -> None:
    found = plant(HELPS, 0, seed=seed)
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
    found = plant(HELPS, 0.001)
    found.run(120, 8)
    end = found.now
    values = [found.dial.confidence(end + module.IDLE_SECONDS * i + 0.01) for i in range(5)]
    assert values == [0.5, 0.6, 0.7, 0.8, 0.8]


def test_a_long_step_is_no_idle_time() -> None:
    found = plant(HELPS, 0.001)
    found.run(120, 8)
    long = 10 * module.IDLE_SECONDS
    found.dial.observe(DialStep(found.now + long, long - 0.1, 500, 1, 1, [DialRow(0.5, long, 1)]))
    assert found.dial.confidence(found.now + long) == 0.5


def test_a_burst_after_hours_begins_at_the_default() -> None:
    found = plant(HELPS, 0.001)
    found.run(120, 8)
    found.now += 7200
    assert found.dial.confidence(found.now) == 0.8


# A machine where it does not


@quick
@given(st.integers(1, 12), st.floats(0, 0.02), st.integers(0, 99))
def test_where_a_lower_confidence_costs_time_it_goes_back_and_tries_ever_less(
    load: int, noise: float, seed: int
) -> None:
    found = plant(HARMS, 1e-6, noise=noise, seed=seed)
    found.run(400, load)
    assert min(found.seen) == 0.7  # one level is tried, never one below what has cost time
    down = [i for i, (a, b) in enumerate(zip(found.seen, found.seen[1:], strict=False)) if b < a]
    assert 1 <= len(down) <= 3  # after 60 s, 120 s, 240 s
    assert found.seen.count(0.8) > 0.75 * len(found.seen)


@quick
@given(st.integers(2, 12), st.floats(0, 0.02), st.integers(0, 99))
def test_where_nothing_changes_it_looks_down_to_the_bound_and_goes_back(load: int, noise: float, seed: int) -> None:
    found = plant(CHANGES_NOTHING, 1e-6, noise=noise, seed=seed)
    found.run(500, load)
    down = [a for a, b in zip(found.seen, found.seen[1:], strict=False) if a == 0.8 > b]
    assert 1 <= len(down) <= 4  # after 60 s, 120 s, 240 s
    assert found.seen.count(0.8) > 0.75 * len(found.seen)


def twice_as_slow(now: float) -> float:
    return 1.0 if now < 130 else 2.0


def ever_slower(now: float) -> float:
    return 1 + 2 * min(1.0, max(0.0, (now - 110) / 120))


@pytest.mark.parametrize("slowness", [twice_as_slow, ever_slower])
@pytest.mark.parametrize("seed", range(4))
def test_a_slowdown_at_which_it_acts_is_not_blamed_on_the_tokens_that_it_adds(
    slowness: Callable[[float], float], seed: int
) -> None:
    for cost in (HELPS, HARMS):
        dial = ConfidenceDial(0.5, 0.8, 0.19)  # a step of 32 rows takes 0.17 s until then
        found = Plant(dial, cost, noise=0.05, regular=False, seed=seed, slowness=slowness)
        found.run(10, 32)
        assert set(found.seen) == {0.8}
        found.run(50, 32)
        begun = len(found.seen)
        found.run(300, 32)
        at_default = found.seen[begun:].count(0.8) / len(found.seen[begun:])
        assert at_default == 0 if cost == HELPS else at_default > 0.7


def test_a_gain_that_neighbours_do_not_show_is_found_further_down() -> None:
    """Each level takes a little less time than the one above, too little for one step to tell."""
    found = plant(0.89, 1e-6)
    assert found.felt(8, 0.7) / found.felt(8, 0.8) > 1 - module.MIN_GAIN
    assert found.felt(8, 0.6) / found.felt(8, 0.8) < 1 - module.MIN_GAIN
    found.run(60, 8)
    assert found.seen[-1] <= 0.6
    found.dial.target_seconds = 1.0
    found.run(20, 8)
    assert 0.7 not in found.seen[-100:]  # back to where it came from, not to a level that gained nothing
    assert found.seen[-1] == 0.8


def test_answers_whose_confidence_others_named_are_no_trouble() -> None:
    found = plant(HELPS, 0.001, pinned=8)
    found.run(120, 8)
    assert found.seen[-1] == 0.5


def test_a_trial_that_shows_nothing_ends() -> None:
    """What further tokens cost is not known before there are any, and not from steps with prompts either."""
    found = plant(HELPS, 0.001)
    while not found.moves:
        found.run(1, 8)
    assert found.seen[-1] == 0.7
    found.dial._measured._cells.clear()
    found.prompts = True
    found.run(module.TRIAL_SECONDS + 20, 8)
    assert found.seen.count(0.5) == found.seen.count(0.6) == 0
    assert found.seen[-1] == 0.8


def test_steps_with_prompts_are_felt_but_tell_nothing_of_a_confidence() -> None:
    dial = ConfidenceDial(0.6, 0.8, 0.01)
    for i in range(10 * MIN_STEPS):
        group = [DialRow(0.8, 0.1, 1)] * 4
        dial.observe(DialStep(i / 10, 0.1, 100, 4, 4, group))
    assert dial.confidence(MIN_STEPS) == 0.8  # far above the target, but nothing could be compared


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
    verified = fake_info(fake_config(groups="verified"), model="smol")
    with pytest.raises(ConfigError, match=r"the groups of smol are verified: .* --groups composed"):
        AutoConfidence(target_seconds=1).dial(verified)
    with pytest.raises(ConfigError, match=r"min_confidence is 0.8: it must be below 0.8"):
        AutoConfidence(target_seconds=1, min_confidence=0.8).dial(fake_info(fake_config()))
