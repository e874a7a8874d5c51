"""Tables of an evaluation of settled slots: one line a policy, in all, by kind and by place, with intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hamburger.training.settling.choice import Policy
from hamburger.training.statistics import Draws, Interval, Ratio, ratio, resample

_ROUNDS = 1000
_PLACES = ((0, 1), (2, 3), (4, 7))  # first and last bucket of 256 tokens


def write_report(out: Path, rows: Sequence[dict[str, Any]], policies: Sequence[Policy], seed: int) -> str:
    """results.json, results.md and, where matplotlib is installed, results.png in the folder; returns the second."""
    found = [of_policy(p, [r for r in rows if r["policy"] == p.name], seed) for p in policies]
    found = [entry for entry in found if entry is not None]
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = table(found)  # type: ignore[arg-type]
    (out / "results.md").write_text(text + "\n", encoding="utf-8")
    if found and find_spec("matplotlib") is not None:  # of the train extra
        from hamburger.training.settling.plot import plot

        plot(out / "results.png", found)  # type: ignore[arg-type]
    return text


def of_policy(policy: Policy, rows: Sequence[dict[str, Any]], seed: int) -> dict[str, Any] | None:
    """All figures of a policy; None where nothing settled. Intervals: 95 %, bootstrap over texts in their kinds."""
    if not rows:
        return None
    draws = resample([row["kind"] for row in rows], _ROUNDS, seed)
    s = policy.settling
    return {
        "score": policy.score,
        "window": s.window,
        "growth": round(s.growth, 3),
        "keep": s.keep,
        "chunk": s.chunk,
        "texts": len(rows),
        "tokens_per_slot": sum(r["tokens"] for r in rows) / sum(r["slots"] for r in rows),
        "all": _figures(rows, draws, (0, 1 << 30)),
        "places": {
            f"{256 * a} to {256 * (b + 1)}": _figures(rows, draws, (a, b))
            for a, b in _PLACES
            if any(a <= int(bucket) <= b for row in rows for bucket in row["sums"])
        },
        "kinds": {
            kind: _figures(of_kind, resample([0] * len(of_kind), _ROUNDS, seed), (0, 1 << 30))
            for kind in sorted({r["kind"] for r in rows})
            for of_kind in [[r for r in rows if r["kind"] == kind]]
        },
    }


def _figures(rows: Sequence[dict[str, Any]], draws: Draws, buckets: tuple[int, int]) -> dict[str, Any]:
    """tokens, and kl, same and nats a token as [value, low, high]."""
    first, last = buckets
    sums = [
        [sum(v[i] for b, v in row["sums"].items() if first <= int(b) <= last) for i in range(4)] for row in rows
    ]  # fmt: skip
    tokens = [s[0] for s in sums]
    told: dict[str, Any] = {"tokens": sum(tokens)}
    for i, name in enumerate(("kl", "same", "nats"), start=1):
        interval: Interval = ratio(Ratio([s[i] for s in sums], tokens), draws)
        told[name] = [interval.value, interval.low, interval.high]
    return told


def table(found: Sequence[dict[str, Any]]) -> str:
    heads = ["who stays", "window", "growth", "keep", "texts", "tokens a slot", "KL", "same", "nats"]
    places: dict[str, Any] = max((entry["places"] for entry in found), key=len, default={})
    heads += [f"KL, {place}" for place in places]
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for entry in found:
        figures = entry["all"]
        cells = [entry["score"], entry["window"], entry["growth"], entry["keep"], entry["texts"]]
        cells += [f"{entry['tokens_per_slot']:.2f}", _shown(figures["kl"], 4), _shown(figures["same"], 3)]
        cells += [_shown(figures["nats"], 3), *(_kl(entry["places"].get(place)) for place in places)]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _kl(figures: dict[str, Any] | None) -> str:
    return "" if figures is None else f"{figures['kl'][0]:.4f}"


def _shown(interval: Sequence[float], digits: int) -> str:
    value, low, high = (f"{x:.{digits}f}" for x in interval)
    return f"{value} [{low}, {high}]"
