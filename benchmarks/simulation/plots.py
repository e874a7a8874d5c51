"""The report's pictures (matplotlib, of the train extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from simulation.simulator import Moment
from simulation.studies import USUAL_LOAD

Rows = Sequence[Mapping[str, Any]]
POINTS = 800  # of a curve over time


def plot_slots(runs: Mapping[str, Sequence[Moment]], title: str, path: Path) -> None:
    """KV slots in use over time, one panel a model: those of answers, and above them all others that are held."""
    figure, axes = pyplot.subplots(1, len(runs), figsize=(10, 4.4), sharex=True, sharey=True, layout="constrained")
    for axis, (name, moments) in zip(axes, runs.items(), strict=True):
        moments = moments[:: max(1, len(moments) // POINTS)]
        minutes = [moment.time / 60 for moment in moments]
        answers = [moment.answer_slots for moment in moments]
        used = [moment.used_slots for moment in moments]
        axis.fill_between(minutes, 0, answers, label="of answers: one a group", color="tab:orange", lw=0)
        axis.fill_between(
            minutes, answers, used, label="of prompts, and blocks not full", color="tab:blue", alpha=0.5, lw=0
        )
        held = sum(a.answer_slots * (b.time - a.time) for a, b in pairwise(moments))
        mean = held / max(moments[-1].time - moments[0].time, 1e-9)
        axis.set(title=f"{name}\n{mean:,.0f} slots of answers on average", xlabel="minutes")
    axes[0].set(ylabel="KV slots in use", ylim=(0, None))
    axes[0].legend(loc="upper left")
    figure.suptitle(title)
    _save(figure, path)


def plot_loads(rows: Rows, path: Path) -> None:
    """Goodput, p99 TTFT and p99 TPOT against the load, one row of panels a trace."""
    traces = [*dict.fromkeys(row["trace"] for row in rows if row["load"] != USUAL_LOAD)]
    panels = {"goodput": "goodput, requests/s", "ttft_p99": "p99 time to first token, s", "tpot_p99": "p99 s a token"}
    figure, grid = pyplot.subplots(len(traces), 3, figsize=(11, 3 * len(traces)), squeeze=False, layout="constrained")
    for trace, axes in zip(traces, grid, strict=True):
        for axis, (key, label) in zip(axes, panels.items(), strict=True):
            for model, mine in _by(rows, "model", trace).items():
                axis.plot([row["load"] for row in mine], [row[key] for row in mine], marker="o", ms=3, label=model)
            axis.set(xlabel="load (1: what the base can do)", ylabel=label, title=trace)
            if key != "goodput":
                axis.set_yscale("log")
    grid[0][0].legend(fontsize=7)
    _save(figure, path)


def plot_pools(rows: Rows, path: Path) -> None:
    """Preemptions, replayed work and prefix hits as the pool shrinks, one row of panels a trace."""
    traces = [*dict.fromkeys(row["trace"] for row in rows)]
    panels = {
        "preemptions_per_request": "preemptions a request",
        "replayed_share": "share of slots computed again",
        "cached_share": "share of prompts found in the cache",
    }
    figure, grid = pyplot.subplots(len(traces), 3, figsize=(11, 3 * len(traces)), squeeze=False, layout="constrained")
    for trace, axes in zip(traces, grid, strict=True):
        for axis, (key, label) in zip(axes, panels.items(), strict=True):
            for model, mine in _by(rows, "model", trace).items():
                axis.plot([row["pool"] for row in mine], [row[key] for row in mine], marker="o", ms=3, label=model)
            if key == "cached_share" and (findable := next(r["findable_share"] for r in rows if r["trace"] == trace)):
                axis.axhline(findable, color="grey", ls=":", label="never forgetting")
                axis.legend(fontsize=7)
            axis.set(xlabel="pool, in whole contexts", ylabel=label, title=trace, ylim=(0, None))
            axis.set_xscale("log", base=2)
    grid[0][0].legend(fontsize=7)
    _save(figure, path)


def plot_costs(rows: Rows, path: Path) -> None:
    """How cost grows with streams, context and output length: whole batches of equal requests."""
    panels = {
        "streams": ("tokens_per_second", "streams (256 + 64 tokens)", "tokens/s of all, whole answers"),
        "context": ("decoding_seconds_a_token", "prompt, slots (8 streams)", "seconds a token, decoding alone"),
        "output": ("seconds", "output, tokens (8 streams, 256 of prompt)", "seconds for all 8, prompts included"),
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, (varied, (key, across, up)) in zip(axes, panels.items(), strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            mine = [row for row in rows if (row["model"], row["varied"]) == (model, varied)]
            axis.plot([row["value"] for row in mine], [row[key] for row in mine], marker="o", ms=3, label=model)
        axis.set(xlabel=across, ylabel=up, ylim=(0, None))
    axes[0].legend(fontsize=7)
    _save(figure, path)


def _by(rows: Rows, key: str, trace: str) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["trace"] == trace:
            found.setdefault(row[key], []).append(row)
    return found


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=85)
    pyplot.close(figure)
