"""ConfidenceDial: the confidence of requests that leave it to the server, so that their tokens come in time.

It decides; it does no IO and has no clock: it is told of every step, and asked for the value in force at a time.

    level      0      1      2           above the target: one level down, if the last one down has paid
    value     0.8    0.7    0.6          below it, and the level above would be too: one up
               default ──► floor         one that does not pay: one up, and not again for a while
                                         idle: one up every few seconds
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hamburger.engine.messages import EngineInfo
from hamburger.engine.time_per_token import TimePerToken
from hamburger.model.config import ConfigError

LARGEST_STEP = 0.1  # between two levels
DEFAULT_RANGE = 0.2  # of a dial whose lower bound is not given
WINDOW_SECONDS, WINDOW_GROUPS = 1.0, 48  # each decision looks at so much, all of it at the level in force
MARGIN = 0.1  # below the target, before the confidence is raised
MIN_GAIN = 0.02  # of time per token, for a level to pay
ASSUMED_RATIO = 0.9  # time per token of a level over that of the one above it, where it is not known
IDLE_SECONDS = 5.0  # without an answer, for each level up
TRIAL_SECONDS = 120.0  # for a level to show that it pays
RETRY_SECONDS, MAX_RETRY_SECONDS = 60.0, 3600.0  # until one that did not pay is tried again; doubled each time
_PURE = 0.75  # share of a step's rows that ran at one level, for the step to tell of it


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
    """What answers at the level in force have felt since `start`."""

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
        self._pays = [False] * len(self.levels)
        self._ratio = [ASSUMED_RATIO] * len(self.levels)
        self._tried_seconds = [0.0] * len(self.levels)
        self._retry_at = [-math.inf] * len(self.levels)
        self._retry_seconds = [RETRY_SECONDS] * len(self.levels)

    def confidence(self, now: float) -> float:
        """The value in force."""
        self._rest(now)
        return self.levels[self._level]

    def observe(self, step: DialStep) -> None:
        """Take a step in. What goes unobserved (other answers, idle time) turns the dial back up."""
        self._rest(step.time - step.seconds)  # a long step is no idle time
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
        """Steps with prompts in them tell of the prompts."""
        if step.prompt_slots or step.seconds <= 0:
            return
        counts = dict.fromkeys((row.confidence for row in step.rows), 0)
        for row in step.rows:
            counts[row.confidence] += 1
        confidence, count = max(counts.items(), key=lambda item: item[1])
        if count >= _PURE * step.num_rows:
            self._measured.add(
                self._numbers[confidence], step.time, step.seconds, step.num_rows, max(step.num_tokens, 1)
            )

    def _decide(self, now: float) -> None:
        window, level = self._window, self._level
        load = window.load / window.groups
        self._window = _Window(now)
        if level and not self._is_worth_it(level, load, now - window.start):
            self._retry_at[level] = now + self._retry_seconds[level]
            self._retry_seconds[level] = min(2 * self._retry_seconds[level], MAX_RETRY_SECONDS)
            self._tried_seconds[level], self._pays[level] = 0.0, False
            self._measured.forget(level)
            self._level -= 1
            return
        felt = window.seconds / window.tokens
        if felt > self.target_seconds:
            if self._may_go_below(level, load, now):
                self._level += 1
        elif level and felt / self._ratio[level] < self.target_seconds * (1 - MARGIN):
            self._level -= 1

    def _may_go_below(self, level: int, load: float, now: float) -> bool:
        if level + 1 == len(self.levels) or now < self._retry_at[level + 1] or (level and not self._pays[level]):
            return False
        return self._pays[level + 1] or self._measured.is_known(level, load, now)

    def _is_worth_it(self, level: int, load: float, seconds: float) -> bool:
        """Whether this level may go on: it pays, has paid and nothing says otherwise, or still has time to show it."""
        ratio = self._measured.ratio(level, level - 1, load)
        if ratio is None:
            self._tried_seconds[level] += seconds
            return self._pays[level] or self._tried_seconds[level] < TRIAL_SECONDS
        self._tried_seconds[level] = 0.0
        # What has paid is given up only once it costs, so that noise does not turn the dial to and fro.
        pays = ratio <= (1 if self._pays[level] else 1 - MIN_GAIN)
        if pays:
            self._pays[level], self._ratio[level], self._retry_seconds[level] = True, min(ratio, 1.0), RETRY_SECONDS
        return pays

    def _rest(self, now: float) -> None:
        """One level up for every IDLE_SECONDS in which no answer of the dial's was running."""
        while self._level and now - self._last_seen >= IDLE_SECONDS:
            self._level -= 1
            self._last_seen += IDLE_SECONDS
            self._window = _Window(now)
        if now - self._last_seen >= IDLE_SECONDS:
            self._window = _Window(-math.inf)  # the next one begins with work


def levels_between(low: float, high: float) -> tuple[float, ...]:
    """From high to low in equal steps of at most LARGEST_STEP, to four digits; both ends as they are."""
    number = max(1, math.ceil((high - low) / LARGEST_STEP - 1e-9))
    between = (round(high - (high - low) * i / number, 4) for i in range(1, number))
    return tuple(dict.fromkeys((high, *between, low)))
