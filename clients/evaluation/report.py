"""Figures of an evaluation: scores with intervals, differences item by item, usage; as JSON and as tables.

Pure but for printing; an earlier run's JSON can be read back to be compared with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hamburger.clients.evaluation.answers import Usage
from hamburger.clients.evaluation.bootstrap import LEVEL, Interval, bootstrap_mean, paired_bootstrap
from hamburger.clients.evaluation.errors import EvalError
from hamburger.clients.output_files import reading

Scores = dict[str, dict[str, float]]  # item id -> metric -> 0 or 1


@dataclass(frozen=True, slots=True)
class Side:
    """What one server did in one task. usage: None where nothing was written (choices)."""

    scores: Scores
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One metric of one task over `items` items; b and difference (a - b) are None without a second side."""

    task: str
    metric: str
    items: int
    a: Interval
    b: Interval | None
    difference: Interval | None


def compare(task: str, metrics: Sequence[str], a: Side, b: Side | None, *, samples: int, seed: int) -> list[Figures]:
    """The figures of a task. With two sides, only items that both have count. Raises EvalError without any."""
    ids = [id_ for id_ in a.scores if b is None or id_ in b.scores]
    if not ids:
        raise EvalError(f"{task}: the two sides share no item id: evaluate both on the same --data.")
    figures = []
    for metric in metrics:
        ours = [a.scores[id_][metric] for id_ in ids]
        interval = bootstrap_mean(ours, samples=samples, seed=seed)
        if b is None:
            figures.append(Figures(task, metric, len(ids), interval, None, None))
            continue
        theirs = [b.scores[id_][metric] for id_ in ids]
        other = bootstrap_mean(theirs, samples=samples, seed=seed)
        difference = paired_bootstrap(ours, theirs, samples=samples, seed=seed)
        figures.append(Figures(task, metric, len(ids), interval, other, difference))
    return figures


def task_report(figures: Sequence[Figures], a: Side, b: Side | None) -> dict[str, Any]:
    """One task for the JSON file; with two sides, figures are over the items that both have, `scores` of all."""
    sides = {"a": a} if b is None else {"a": a, "b": b}
    names = ("a",) if b is None else ("a", "b", "difference")
    return {
        "items": figures[0].items,
        "metrics": {f.metric: {name: asdict(getattr(f, name)) for name in names} for f in figures},
        "usage": {name: _usage_report(side.usage) for name, side in sides.items() if side.usage is not None},
        "scores": {name: side.scores for name, side in sides.items()},
    }


def _usage_report(usage: Usage) -> dict[str, Any]:
    rates = {"tokens_per_kv": usage.tokens_per_kv, "tokens_per_second": usage.tokens_per_second}
    return {**asdict(usage), **rates}


def read_report(path: Path, metrics: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Side]]:
    """Label and sides of the first server in --compare, an earlier run's JSON. metrics: of each task that is asked for.

    Raises OSError that names the option, or EvalError that names what is missing.
    """
    remedy = "name a file that hamburger eval-tasks wrote with --out."
    with reading("--compare", path):
        data = path.read_bytes()
    try:
        report = json.loads(data.decode())
        label = str(report["servers"]["a"]["label"])
        tasks = report["tasks"]
        absent = sorted(metrics.keys() - tasks.keys())
    except (ValueError, LookupError, TypeError, AttributeError):
        raise EvalError(f"--compare {path} holds no results: {remedy}") from None
    if absent:
        raise EvalError(f"--compare {path} has no {', '.join(absent)}: leave them out of --tasks, or {remedy}")
    sides = {}
    try:
        for task, names in metrics.items():
            rows = tasks[task]["scores"]["a"]
            scores = {id_: {name: float(row[name]) for name in names} for id_, row in rows.items()}
            usage = tasks[task]["usage"].get("a")
            known = None if usage is None else Usage(**{name: usage[name] for name in Usage.__dataclass_fields__})
            sides[task] = Side(scores, known)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise EvalError(f"--compare {path} holds no scores of each item of {task}: {remedy}") from None
    return label, sides


def print_tables(
    out: Console,
    labels: Sequence[str],
    figures: Sequence[Figures],
    usages: Sequence[tuple[str, str, Usage]],
) -> None:
    """The scores, and beside them the usage: (task, "A" or "B", sums) of written answers."""
    two = len(labels) == 2
    for name, label in zip("AB", labels, strict=False):
        out.print(f"{name}: {label}", markup=False, soft_wrap=True)
    scores = Table(box=SIMPLE, pad_edge=False)
    for name in ("task", "metric"):
        scores.add_column(name, no_wrap=True)
    for name in ("items", "A", *(("B", "A - B") if two else ())):
        scores.add_column(name, justify="right", overflow="fold")  # a figure is never cut
    for f in figures:
        intervals = (_interval(i, signed=i is f.difference) for i in (f.a, f.b, f.difference) if i is not None)
        scores.add_row(f.task, f.metric, str(f.items), *intervals)
    out.print(scores)
    paired = ", paired by item" if two else ""
    out.print(f"Per cent; in brackets {LEVEL:.0%} bootstrap intervals{paired}.", style="dim")
    if usages:
        speeds = Table(box=SIMPLE, pad_edge=False)
        for name in ("task", "server"):
            speeds.add_column(name, no_wrap=True)
        for name in ("tokens", "tokens/KV", "tok/s", "cut"):
            speeds.add_column(name, justify="right", overflow="fold")
        for task, name, usage in usages:
            tokens = "-" if usage.completion_tokens is None else f"{usage.completion_tokens:,}"
            rates = (usage.tokens_per_kv, usage.tokens_per_second)
            speeds.add_row(task, name, tokens, *("-" if r is None else f"{r:,.2f}" for r in rates), str(usage.cut))
        out.print(speeds)
        out.print("cut: answers that the token limit ended.", style="dim")


def _interval(interval: Interval, *, signed: bool) -> str:
    """Two lines, in per cent: with two sides, a wider cell would not fit into 80 columns."""
    sign = "+" if signed else ""
    value, low, high = (f"{100 * x:{sign}.1f}" for x in (interval.value, interval.low, interval.high))
    return f"{value}\n[{low}, {high}]"
