"""Whether a model keeps what a HAMburger promises: thresholds, and a verdict line for each. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hamburger.training.quality.points import ALL, Dial, Point
from hamburger.training.statistics import Interval

MIN_TOKENS_PER_KV = 1.5
MAX_NLL_DIFFERENCE = 0.15  # nats
MAX_REPETITION_QUOTIENT = 1.2
MAX_EOS_DIFFERENCE = 0.05
MAX_DIAL_SHORTFALL = 0.05
MAX_MICRO_STEP_COST = 0.15
MIN_DIAL_TOKENS = 30  # by position; a mean over fewer says nothing


@dataclass(frozen=True, slots=True)
class Verdict:
    """passed: None where it was not measured."""

    claim: str
    measured: str
    passed: bool | None


def verdicts(points: Sequence[Point], default: float, micro_step: float | None) -> list[Verdict]:
    """points: of the model, without the base's. default: the model's own confidence, which is among them."""
    at_default = _point(points, default)
    at_one = _point(points, 1.0)
    lines = [*_quality(at_default)] if at_default else []
    lines.append(_dial_line(f"at {default:g}: accepted tokens have mean base probability", at_default))
    lines.append(_whole_dial(points))
    lines += _unmerged(at_one)
    lines.append(
        Verdict(
            f"a micro-step costs at most {MAX_MICRO_STEP_COST:g} of a base step (on CPU)",
            "not measured" if micro_step is None else f"{micro_step:.3f}",
            None if micro_step is None else micro_step <= MAX_MICRO_STEP_COST,
        )
    )
    return lines


def keeps_quality(point: Point) -> bool:
    """Whether a point meets everything but the number of tokens per KV."""
    dial = point.dial.get(ALL)
    honest = dial is None or point.confidence is None or _is_honest(dial, point.confidence)
    return honest and all(line.passed for line in _quality(point)[1:])


def suggested_confidence(points: Sequence[Point]) -> float | None:
    """The measured confidence with most tokens per KV among those that keep the quality; None where none does."""
    good = [point for point in points if keeps_quality(point)]
    return max(good, key=lambda p: p.figures["tokens_per_kv"].value).confidence if good else None


def shown(interval: Interval, digits: int = 3, sign: bool = False) -> str:
    """`value [low, high]`; a dash where there is none, as for 0 / 0."""
    if math.isnan(interval.value):
        return "-"
    value, low, high = (f"{x:{'+' if sign else ''}.{digits}f}" for x in (interval.value, interval.low, interval.high))
    return f"{value} [{low}, {high}]"


def _quality(point: Point) -> list[Verdict]:
    """Tokens per KV first, then what must hold beside it."""
    f, at = point.figures, f"at {point.confidence:g}:"
    repetition, base_repetition = f["repetition"].value, f["repetition"].value - f["repetition_difference"].value
    return [
        Verdict(
            f"{at} tokens per KV at least {MIN_TOKENS_PER_KV:g}",
            shown(f["tokens_per_kv"]),
            _held(f["tokens_per_kv"].value >= MIN_TOKENS_PER_KV, f["tokens_per_kv"]),
        ),
        Verdict(
            f"{at} nats a token under the base at most {MAX_NLL_DIFFERENCE:g} above the base's own",
            shown(f["nll_difference"], sign=True),
            _held(f["nll_difference"].value <= MAX_NLL_DIFFERENCE, f["nll_difference"]),
        ),
        Verdict(
            f"{at} 4-gram repetition at most {MAX_REPETITION_QUOTIENT:g} x the base's",
            f"{shown(f['repetition_quotient'])} ({repetition:.4f} against {base_repetition:.4f})",
            _held(repetition <= MAX_REPETITION_QUOTIENT * base_repetition + 1e-12, f["repetition_difference"]),
        ),
        Verdict(
            f"{at} answers that end with EOS within {100 * MAX_EOS_DIFFERENCE:g} points of the base's",
            f"{shown(_points_of(f['eos_difference']), 1, sign=True)} points "
            f"(before the cut {100 * f['uncut_eos_difference'].value:+.1f})",
            _held(abs(f["eos_difference"].value) <= MAX_EOS_DIFFERENCE + 1e-12, f["eos_difference"]),
        ),
    ]


def _unmerged(point: Point | None) -> list[Verdict]:
    exactly, equal = "at 1: exactly 1 token per KV", "at 1: quality equal to the base's within the intervals"
    if point is None:
        return [Verdict(claim, "not measured", None) for claim in (exactly, equal)]
    differences = {
        "nats": point.figures["nll_difference"],
        "repetition": point.figures["repetition_difference"],
        "EOS": point.figures["eos_difference"],
    }
    return [
        Verdict(exactly, f"{point.figures['tokens_per_kv'].value:.4f}", point.only_single_groups),
        Verdict(
            equal,
            ", ".join(f"{name} {shown(d, sign=True)}" for name, d in differences.items()),
            _held(all(d.low <= 0 <= d.high for d in differences.values()), *differences.values()),
        ),
    ]


def _dial_line(claim: str, point: Point | None) -> Verdict:
    dial = None if point is None else point.dial.get(ALL)
    if point is None or point.confidence is None or dial is None:
        return Verdict(f"{claim} of at least c - {MAX_DIAL_SHORTFALL:g}", "nothing was accepted", None)
    least = point.confidence - MAX_DIAL_SHORTFALL
    return Verdict(f"{claim} of at least {least:g}", shown(dial.probability), _is_honest(dial, point.confidence))


def _whole_dial(points: Sequence[Point]) -> Verdict:
    """The worst of every measured confidence and position."""
    claim = f"at every confidence c and position: mean base probability at least c - {MAX_DIAL_SHORTFALL:g}"
    found = [
        (dial.probability.value - point.confidence, point.confidence, name, dial)
        for point in points
        for name, dial in point.dial.items()
        if point.confidence is not None and dial.count >= MIN_DIAL_TOKENS
    ]
    if not found:
        return Verdict(claim, "nothing was accepted", None)
    margin, confidence, name, dial = min(found, key=lambda f: f[0])
    where = "all positions" if name == ALL else f"position {name}"
    return Verdict(
        claim,
        f"worst at {confidence:g}, {where}: {shown(dial.probability)}, so c {margin:+.3f}",
        margin >= -MAX_DIAL_SHORTFALL,
    )


def _is_honest(dial: Dial, confidence: float) -> bool:
    return dial.probability.value >= confidence - MAX_DIAL_SHORTFALL


def _held(passed: bool, *figures: Interval) -> bool | None:
    """None where one of the figures is 0 / 0: nothing was measured."""
    return None if any(math.isnan(figure.value) for figure in figures) else passed


def _points_of(share: Interval) -> Interval:
    return Interval(100 * share.value, 100 * share.low, 100 * share.high)


def _point(points: Sequence[Point], confidence: float) -> Point | None:
    return next((point for point in points if point.confidence == confidence), None)
