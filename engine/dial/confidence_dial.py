"""ConfidenceDial: the confidence of requests that leave it to the server, so that their tokens come in time.

It decides; it does no IO and has no clock: it observes every step, and is asked for the value in force at a time.

    level      0      1      2           above the target: down to the next level that is known to pay, or to try one
    value     0.8    0.7    0.6          tried, and shows too little either way: one further down
               default ──► floor         that costs time, or shows nothing down to the floor: back, and not again soon
                                         below the target, and where it came from would be too: back there
                                         idle: one up every few seconds
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hamburger.engine.dial.time_per_token import TimePerToken
from hamburger.engine.types.messages import EngineInfo
from hamburger.model.config import ConfigError

LARGEST_STEP = 0.1  # between two levels
DEFAULT_RANGE = 0.2  # of a dial whose lower bound is not given
WINDOW_SECONDS, WINDOW_GROUPS = 1.0, 48  # each decision looks at so much, all of it at the level in force
MARGIN = 0.1  # below the target, before the confidence is raised
MIN_GAIN = 0.02  # of time per token, for a level to pay
IDLE_SECONDS = 5.0  # without an answer, for each level up
TRIAL_SECONDS = 120.0  # for a level to show that it pays
RETRY_SECONDS, MAX_RETRY_SECONDS = 60.0, 3600.0  # until one that did not pay is tried again; doubled each time


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfidence:
    """What the operator asks for: target_seconds a token, and how low the confidence may go for it.

    min_confidence: None for DEFAULT_RANGE below the engine's default, which is the upper bound.
    """

    target_seconds: float
    min_confidence: float | None = None

    def dial(self, info: EngineInfo) -> ConfidenceDial:
        """Raises ConfigError where the model, or its default, leaves nothing to choose."""
        if info.is_plain_base:
            raise ConfigError(
                f"confidence is auto, but {info.model} is a plain base model, whose groups always have one token: "
                "leave confidence and target_tpot_ms away."
            )
        if info.groups == "verified":
            raise ConfigError(
                f"confidence is auto, but the groups of {info.model} are verified: its drafts follow the load anyway, "
                "and confidence never changes its text. Leave confidence and target_tpot_ms away, or serve with "
                "--groups composed."
            )
        high = info.default_confidence
        low = max(0.0, round(high - DEFAULT_RANGE, 4)) if self.min_confidence is None else self.min_confidence
        if not low < high:
            raise ConfigError(f"min_confidence is {low:g}: it must be below {high:g}, the upper bound.")
        return ConfidenceDial(low, high, self.target_seconds)


@dataclass(frozen=True, slots=True)
class DialRow:
    """A group of an answer that the dial chose for; gap_seconds since its last group, None for its first."""

    confidence: float
    gap_seconds: float | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DialStep:
    """One step, which ended at `time`. num_rows and num_tokens: of all answers; `rows`: of those it chose for."""

    time: float
    seconds: float
    prompt_slots: int
    num_rows: int
    num_tokens: int
    rows: Sequence[DialRow]


class _Window:
    """The gaps between groups of answers at the level in force, since `start`."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.seconds = 0.0
        self.groups = self.tokens = self.load = 0

    def add(self, step: DialStep, rows: Sequence[DialRow]) -> None:
        for row in rows:
            if row.gap_seconds is not None:
                self.seconds += row.gap_seconds
                self.tokens += row.num_tokens
                self.groups += 1
                self.load += step.num_rows


@dataclass(frozen=True, slots=True)
class _Gain:
    """What a level that pays was compared with, and its time per token over that one's."""

    above: int
    ratio: float


class ConfidenceDial:
    """Times are seconds of one clock that never goes back."""

    def __init__(self, low: float, high: float, target_seconds: float) -> None:
        """0 <= low < high <= 1. target_seconds: the time per token to hold."""
        self.levels = levels_between(low, high)
        self.target_seconds = target_seconds
        self._numbers = {confidence: number for number, confidence in enumerate(self.levels)}
        self._level = 0
        self._measured = TimePerToken()
        self._window = _Window(-math.inf)
        self._last_seen = -math.inf
        self._above = 0  # the level that the present one is compared with: the next above it that pays, or the default
        self._pays: dict[int, _Gain] = {}
        self._tried_seconds = 0.0
        self._retry_at = [-math.inf] * len(self.levels)
        self._retry_seconds = [RETRY_SECONDS] * len(self.levels)

    def confidence(self, now: float) -> float:
        """The value in force."""
        self._turn_up_while_idle(now)
        return self.levels[self._level]

    def observe(self, step: DialStep) -> None:
        """Take a step in. What goes unobserved (other answers, idle time) turns the dial back up."""
        self._turn_up_while_idle(step.time - step.seconds)  # a long step is no idle time
        if not step.rows:
            return
        if self._window.start == -math.inf:
            self._window = _Window(step.time - step.seconds)
        self._last_seen = step.time
        self._measure(step)
        self._window.add(step, [row for row in step.rows if self._numbers[row.confidence] == self._level])
        if self._window.groups >= WINDOW_GROUPS and step.time - self._window.start >= WINDOW_SECONDS:
            self._decide(step.time)

    def _measure(self, step: DialStep) -> None:
        """Steps with prompts in them tell of groups alone: how long they took was the prompts'."""
        for row in step.rows:
            self._measured.add_group(self._numbers[row.confidence], row.num_tokens)
        if step.num_rows and step.seconds > 0:
            is_timed = not step.prompt_slots
            self._measured.add_step(step.seconds, step.num_rows, step.num_tokens, is_timed=is_timed)

    def _decide(self, now: float) -> None:
        window, level = self._window, self._level
        load, seconds_a_token = window.load / window.groups, window.seconds / window.tokens
        self._window = _Window(now)
        if level and not self._keeps_level(load, now - window.start, now):
            return
        if seconds_a_token > self.target_seconds:
            self._go_down(load, now)
        elif level and seconds_a_token / self._pays[level].ratio < self.target_seconds * (1 - MARGIN):
            self._go_back()

    def _keeps_level(self, load: float, seconds: float, now: float) -> bool:
        """Whether the present level pays; where it does not, or not yet, what follows is done here."""
        level = self._level
        ratio = self._measured.ratio(level, self._above, load)
        if level in self._pays:
            # What has paid is given up only once it costs, so that noise does not turn the dial to and fro.
            if ratio is not None and ratio > 1:
                self._give_up(now)
                return False
            self._pays[level] = _Gain(self._above, ratio or self._pays[level].ratio)
            return True
        self._tried_seconds += seconds
        if ratio is None:
            if self._tried_seconds >= TRIAL_SECONDS:
                self._give_up(now)
        elif ratio <= 1 - MIN_GAIN:
            self._pays[level] = _Gain(self._above, ratio)
            self._retry_seconds[self._above + 1 : level + 1] = [RETRY_SECONDS] * (level - self._above)
            return True
        elif ratio <= 1 + MIN_GAIN and self._may_try(level + 1, now):
            # Neighbours can be too alike to tell them apart: the next one shows more, for better or worse.
            self._level, self._tried_seconds = level + 1, 0.0
        else:
            self._give_up(now)
        return False

    def _may_try(self, level: int, now: float) -> bool:
        return level < len(self.levels) and now >= self._retry_at[level]

    def _go_down(self, load: float, now: float) -> None:
        """To the next level that is known to pay, or to try one."""
        known = [level for level, gain in self._pays.items() if gain.above == self._level]
        if known or (self._may_try(self._level + 1, now) and self._measured.is_known(self._level, load)):
            self._level, self._above = min(known, default=self._level + 1), self._level
            self._tried_seconds = 0.0

    def _give_up(self, now: float) -> None:
        """Back to the level above, and for a while neither here again nor on the way here."""
        for level in {self._above + 1, self._level}:
            self._retry_at[level] = now + self._retry_seconds[level]
            self._retry_seconds[level] = min(2 * self._retry_seconds[level], MAX_RETRY_SECONDS)
        for level in range(self._above + 1, self._level + 1):
            self._measured.forget(level)
        self._pays = {level: gain for level, gain in self._pays.items() if level <= self._above}
        self._go_back()

    def _go_back(self) -> None:
        self._level = self._above
        self._above = self._pays[self._level].above if self._level else 0

    def _turn_up_while_idle(self, now: float) -> None:
        """One level up for every IDLE_SECONDS in which no answer of the dial's was running."""
        while self._level and now - self._last_seen >= IDLE_SECONDS:
            self._go_back()
            self._last_seen += IDLE_SECONDS
            self._window = _Window(now)
        if now - self._last_seen >= IDLE_SECONDS:
            self._window = _Window(-math.inf)  # the next one begins with work


def levels_between(low: float, high: float) -> tuple[float, ...]:
    """From high to low in equal steps of at most LARGEST_STEP, to four digits; both ends as they are."""
    number = max(1, math.ceil((high - low) / LARGEST_STEP - 1e-9))
    between = (round(high - (high - low) * i / number, 4) for i in range(1, number))
    return tuple(dict.fromkeys((high, *between, low)))
