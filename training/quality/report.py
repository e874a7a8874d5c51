"""results.json and results.md of an evaluation: everything that was measured, and a table for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hamburger.training.quality.points import ALL, Bin, Point
from hamburger.training.quality.verdict import Verdict, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All that was found. settings: what it depends on, for whoever repeats it; prompts: kind -> prompt ids."""

    model: str
    base: str
    default_confidence: float
    suggested_confidence: float | None
    settings: dict[str, Any]
    prompts: dict[str, list[str]]
    base_point: Point
    points: list[Point]
    reliability: dict[str, list[Bin]]
    micro_step_cost: float | None
    verdicts: list[Verdict]


def write_json(path: Path, evaluation: Evaluation) -> None:
    """Every figure as {value, low, high}; null where there is no number."""
    path.write_text(json.dumps(_plain(asdict(evaluation)), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_markdown(path: Path, evaluation: Evaluation) -> None:
    """The verdict, the table of the curve, tokens per KV and nats by kind, and the dial."""
    path.write_text("\n".join(_page(evaluation)) + "\n", encoding="utf-8")


def verdict_lines(evaluation: Evaluation) -> list[str]:
    """One line a verdict: `ok`, `NO` or `--` (not measured), the claim, and what was measured."""
    marks = {True: "ok", False: "NO", None: "--"}
    lines = [f"{marks[v.passed]}  {v.claim}: {v.measured}" for v in evaluation.verdicts]
    return [*lines, f"    {_suggestion(evaluation)}"]


def _suggestion(e: Evaluation) -> str:
    found = "none of them" if e.suggested_confidence is None else f"{e.suggested_confidence:g}"
    return f"The measured confidence with most tokens per KV that keeps the quality: {found}"


def _page(e: Evaluation) -> Iterator[str]:
    numbers = ", ".join(f"{len(ids)} {kind}" for kind, ids in e.prompts.items())
    yield f"# Quality of {e.model}"
    yield ""
    yield (
        f"Beside the untouched {e.base}; greedy, at most {e.settings['max_tokens']} tokens; held-out prompts: "
        f"{numbers}. Answers are cut at their first repeated 8-gram before anything is counted. Intervals: 95 %, "
        f"paired bootstrap over prompts within their kinds, {e.settings['rounds']} draws, seed {e.settings['seed']}. "
        f"The default confidence is {e.default_confidence:g}."
    )
    yield ""
    yield "## Verdict"
    yield ""
    yield "| | claim | measured |"
    yield "| --- | --- | --- |"
    for v in e.verdicts:
        yield f"| {'-' if v.passed is None else 'yes' if v.passed else '**no**'} | {v.claim} | {v.measured} |"
    yield ""
    yield f"{_suggestion(e)}."
    yield ""
    yield from _curve_table(e)
    yield from _kinds_tables(e)
    yield from _dial_table(e.points)


def _curve_table(e: Evaluation) -> Iterator[str]:
    yield "## The curve"
    yield ""
    yield (
        "| confidence | tokens per KV | nats a token | against the base | 4-gram repetition, % | x the base's "
        "| end with EOS, % | points against the base | cut, % | tokens an answer | decode tokens/s | x the base's |"
    )
    yield "| --- |" + " ---: |" * 11
    for point in [e.base_point, *e.points]:
        f, is_base = point.figures, point.confidence is None
        eos = {n: 100 * getattr(f["eos_difference"], n) for n in ("value", "low", "high")}
        cells = [
            _name(point, e.default_confidence),
            shown(f["tokens_per_kv"], 2),
            f"{f['nll'].value:.3f}",
            "" if is_base else shown(f["nll_difference"], sign=True),
            f"{100 * f['repetition'].value:.2f}",
            "" if is_base else shown(f["repetition_quotient"], 2),
            f"{100 * f['eos'].value:.1f}",
            "" if is_base else f"{eos['value']:+.1f} [{eos['low']:+.1f}, {eos['high']:+.1f}]",
            f"{100 * f['cut'].value:.1f}",
            f"{f['tokens'].value:.0f}",
            f"{point.speed['tokens_per_second'].value:.1f}" if point.speed else "",
            shown(point.speed["speed_quotient"], 2) if point.speed and not is_base else "",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    if e.base_point.speed:
        yield (
            f"Decoding was timed one answer at a time, model and base in turns, prompt work left out "
            f"({e.settings['speed_prompts']} prompts, {e.settings['threads']} threads, {e.settings['device']}, "
            f"weights as {e.settings['weights']})."
        )
        yield ""


def _kinds_tables(e: Evaluation) -> Iterator[str]:
    for title, name, sign in (
        ("Tokens per KV by kind", "tokens_per_kv", False),
        ("Nats a token against the base, by kind", "nll_difference", True),
    ):
        yield f"## {title}"
        yield ""
        yield f"| confidence | {' | '.join(e.prompts)} |"
        yield "| --- |" + " ---: |" * len(e.prompts)
        for point in e.points:
            cells = [shown(point.kinds[kind][name], 2, sign) for kind in e.prompts]
            yield f"| {_name(point, e.default_confidence)} | {' | '.join(cells)} |"
        yield ""


def _dial_table(points: Sequence[Point]) -> Iterator[str]:
    yield "## The dial"
    yield ""
    yield "Mean base probability of the tokens that micro-steps added (their number); predicted: what the dial said."
    yield ""
    names = list(dict.fromkeys(name for p in points for name in p.dial))
    if not names:
        yield "No micro-step added a token."
        return
    heads = ["all positions" if name == ALL else f"position {name}" for name in names]
    yield f"| confidence | predicted | {' | '.join(heads)} |"
    yield "| --- | ---: |" + " ---: |" * len(names)
    for point in points:
        if point.confidence is not None and point.dial:
            dials = [point.dial.get(name) for name in names]
            cells = ["" if d is None else f"{shown(d.probability)} ({d.count})" for d in dials]
            yield f"| {point.confidence:g} | {point.dial[ALL].predicted:.3f} | {' | '.join(cells)} |"


def _name(point: Point, default: float) -> str:
    if point.confidence is None:
        return "untouched base"
    return f"**{point.confidence:g}**" if point.confidence == default else f"{point.confidence:g}"


def _plain(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
