"""From scored answers to the points of the curve: figures with intervals, beside the base, and the dial's honesty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hamburger.training.quality.scores import Accepted, AnswerScore, ratios
from hamburger.training.quality.speed import Timed
from hamburger.training.statistics import Draws, Interval, Ratio, difference, quotient, ratio, resample

ALL = "all"
_BINS = 10


@dataclass(frozen=True, slots=True)
class Dial:
    """Tokens accepted at one confidence and micro-step position (or "all" of them).

    predicted: their mean continue-probability. probability: their mean probability under the base model.
    """

    count: int
    predicted: float
    probability: Interval


@dataclass(frozen=True, slots=True)
class Point:
    """One confidence, or the untouched base (None).

    figures: name -> interval, over all prompts; kinds: the same by kind. `*_difference` and `*_quotient` are against
    the base, prompt by prompt. dial: by micro-step position ("1", ...) and "all"; empty where nothing was accepted.
    speed: decode tokens/s and its quotient over the base; empty where it was not timed.
    """

    confidence: float | None
    only_single_groups: bool
    figures: dict[str, Interval]
    kinds: dict[str, dict[str, Interval]]
    dial: dict[str, Dial]
    speed: dict[str, Interval]


@dataclass(frozen=True, slots=True)
class Bin:
    """A bar of the reliability diagram: accepted tokens whose continue-probability lay in one tenth of [0, 1]."""

    count: int
    predicted: float
    probability: float


def make_point(
    confidence: float | None,
    scores: Sequence[AnswerScore],
    base: Sequence[AnswerScore],
    rounds: int,
    seed: int,
    timed: tuple[Sequence[Timed], Sequence[Timed]] | None = None,
) -> Point:
    """scores and base: the answers to the same prompts in the same order. timed: of this point and of the base.

    Raises ValueError when they are not.
    """
    if [s.prompt_id for s in scores] != [s.prompt_id for s in base]:
        raise ValueError("the answers to be compared are not to the same prompts.")
    by_kind = {}
    for kind in dict.fromkeys(s.kind for s in scores):
        rows = [i for i, s in enumerate(scores) if s.kind == kind]
        draws = resample([kind] * len(rows), rounds, seed)
        by_kind[kind] = _figures([scores[i] for i in rows], [base[i] for i in rows], draws)
    draws = resample([s.kind for s in scores], rounds, seed)
    return Point(
        confidence=confidence,
        only_single_groups=all(s.whole_tokens == s.whole_groups for s in scores),
        figures=_figures(scores, base, draws),
        kinds=by_kind,
        dial=_dial(scores, draws),
        speed={} if timed is None else _speed(*timed, rounds, seed),
    )


def reliability(scores: Iterable[AnswerScore]) -> dict[str, list[Bin]]:
    """The reliability diagram: by position and "all", the bins that hold tokens, in order."""
    accepted = [a for s in scores for a in s.accepted]
    by_position = {str(p): [a for a in accepted if a.position == p] for p in sorted({a.position for a in accepted})}
    return {name: _bins(tokens) for name, tokens in {ALL: accepted, **by_position}.items() if tokens}


def _figures(scores: Sequence[AnswerScore], base: Sequence[AnswerScore], draws: Draws) -> dict[str, Interval]:
    mine, theirs = ratios(scores), ratios(base)
    figures = {name: ratio(figure, draws) for name, figure in mine.items()}
    for name in ("nll", "repetition", "eos", "uncut_eos"):
        figures[f"{name}_difference"] = difference(mine[name], theirs[name], draws)
    figures["repetition_quotient"] = quotient(mine["repetition"], theirs["repetition"], draws)
    return figures


def _dial(scores: Sequence[AnswerScore], draws: Draws) -> dict[str, Dial]:
    positions = sorted({a.position for s in scores for a in s.accepted})
    dial = {}
    for name, wanted in [(ALL, positions), *((str(p), [p]) for p in positions)]:
        tokens = [[a for a in s.accepted if a.position in wanted] for s in scores]
        counts = [len(t) for t in tokens]
        if total := sum(counts):
            probability = Ratio([sum(a.probability for a in t) for t in tokens], counts)
            predicted = sum(a.predicted for t in tokens for a in t) / total
            dial[name] = Dial(total, predicted, ratio(probability, draws))
    return dial


def _speed(mine: Sequence[Timed], base: Sequence[Timed], rounds: int, seed: int) -> dict[str, Interval]:
    draws = resample([ALL] * len(mine), rounds, seed)
    mine_rate, base_rate = (Ratio([sum(t.sizes) for t in x], [sum(t.seconds) for t in x]) for x in (mine, base))
    return {
        "tokens_per_second": ratio(mine_rate, draws),
        "speed_quotient": quotient(mine_rate, base_rate, draws),
    }


def _bins(tokens: Sequence[Accepted]) -> list[Bin]:
    predicted = np.array([a.predicted for a in tokens])
    probability = np.array([a.probability for a in tokens])
    index = np.minimum((predicted * _BINS).astype(int), _BINS - 1)
    return [
        Bin(int(members.sum()), float(predicted[members].mean()), float(probability[members].mean()))
        for members in (index == i for i in range(_BINS))
        if members.any()
    ]
