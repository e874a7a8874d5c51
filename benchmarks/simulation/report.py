"""Writes the report: OUT.json, OUT.md and its pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation.dial_study import dial_tables
from simulation.plots import plot_costs, plot_loads, plot_pools, plot_slots
from simulation.simulator import Moment
from simulation.studies import USUAL_LOAD
from simulation.summaries import table

PICTURES = ("slots", "load", "pool", "cost")


@dataclass(frozen=True, slots=True)
class Pictures:
    """moments: model -> its states over time, on this trace at this load."""

    moments: Mapping[str, Sequence[Moment]]
    trace: str
    load: float


def write_report(out: Path, result: Mapping[str, Any], pictures: Pictures) -> None:
    """The folder is made if need be."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    paths = {name: out.with_name(f"{out.name}-{name}.png") for name in PICTURES}
    title = f"The same requests ({pictures.trace}, load {pictures.load:g}) in the same pool"
    plot_slots(pictures.moments, title, paths["slots"])
    plot_loads(result["loads"], paths["load"])
    plot_pools(result["pools"], paths["pool"])
    plot_costs(result["costs"], paths["cost"])
    out.with_suffix(".md").write_text(markdown(result, {name: path.name for name, path in paths.items()}))


def markdown(result: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """All tables, with the pictures between them."""
    target = result["target"]
    usual = [row for row in result["loads"] if row["load"] == USUAL_LOAD]
    good = f"good: first token within {target['ttft']:g} s and at most {target['tpot']:g} s a token after it"
    parts = [
        "# The scheduler under real traces",
        f"Written by benchmarks/replay.py. Machine: {_pairs(result['machine'])}. Engine: {_pairs(result['settings'])}.",
        "## What a step costs",
        *[_costs(name, model) for name, model in result["models"].items()],
        f"![cost]({pictures['cost']})",
        "## Traces",
        table(
            result["traces"],
            {
                "trace": "trace",
                "requests": "requests",
                "prompt_tokens": "prompt tokens",
                "output_tokens": "output tokens",
                "shortened": "shortened to fit",
                "base_capacity": "the base can do, requests/s",
            },
        ),
        f"## KV slots in use\n\n![slots]({pictures['slots']})",
        f"## Load\n\nLoad {USUAL_LOAD:g} of what the base can do; {good}.",
        table(usual, _LOAD_COLUMNS),
        f"![load]({pictures['load']})",
        "## Fairness\n\nThe same replays by the length of the prompt, in four equal parts.",
        table([{**row, **part} for row in usual for part in row["by_prompt_length"]], _FAIR_COLUMNS),
        "## A smaller pool",
        table(result["pools"], _POOL_COLUMNS),
        f"![pool]({pictures['pool']})",
        "## The step's slot budget",
        table(result["budgets"], {"model": "model", "budget": "slots a step", **_LATENCY_COLUMNS}),
        dial_tables(result["dial"], result["dial_target"]),
        "## One request alone",
        table(result["growth"], {"mean_group": "g", "slots_a_token": "pool slots a token", "one_over_g": "1/g"}),
        *([_live(result["live"])] if "live" in result else []),
    ]
    return "\n\n".join(parts) + "\n"


_LATENCY_COLUMNS = {
    "goodput": "good requests/s",
    "ttft_p50": "TTFT p50, s",
    "ttft_p99": "p99",
    "tpot_p50": "TPOT p50, s",
    "tpot_p99": "p99",
    "gap_p99": "longest gap p99, s",
}
_LOAD_COLUMNS = {
    "trace": "trace",
    "model": "model",
    "requests_per_second": "requests/s",
    **_LATENCY_COLUMNS,
    "mean_slots": "slots in use, mean",
    "mean_answer_slots": "of answers",
    "cached_share": "prompt found",
    "out_of_order": "out of order",
    "passed_over": "steps passed over",
}
_FAIR_COLUMNS = {
    "trace": "trace",
    "model": "model",
    "part": "prompts",
    "longest_prompt": "up to, tokens",
    "wait_p99": "wait p99, s",
    "ttft_p50": "TTFT p50, s",
    "ttft_p99": "p99",
    "tpot_p99": "TPOT p99, s",
}
_POOL_COLUMNS = {
    "trace": "trace",
    "model": "model",
    "total_slots": "pool, slots",
    "preemptions_per_request": "preemptions a request",
    "replayed_share": "computed again",
    "cached_share": "prompt found",
    "findable_share": "never forgetting",
    **_LATENCY_COLUMNS,
}


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _costs(name: str, model: Mapping[str, Any]) -> str:
    costs, error = model["costs"], model["costs"]["error"]
    rows = [{"n": n, "ms": 1000 * s} for n, s in zip(costs["knots"], costs["table"], strict=True)]
    terms = ", ".join(f"{key} {1e6 * value:.3g} µs" for key, value in costs["terms"].items())
    fit = (
        f"{error['steps']} kinds of steps; relative error {error['median_relative_error']:.1%} in the median, "
        f"{error['p90_relative_error']:.1%} at p90; R² {error['r_squared']:.3f}"
    )
    by_rows = table(rows, {"n": "rows", "ms": "ms"})
    return f"**{name}** ({model['model']}, {model['dtype']}): {fit}.\n\n{by_rows}\n\nOne more of each: {terms}."


def _live(live: Mapping[str, Any]) -> str:
    rows = []
    for key in ("ttft_p50", "ttft_p99", "ttft_mean", "tpot_p50", "tpot_p99", "tpot_mean"):
        row = {"figure": key, **{name: live[name][key] for name in ("live", "simulated", "adjusted")}}
        rows.append({**row, "error": f"{live['errors']['adjusted'][key]:+.0%}"})
    text = (
        f"{live['requests']} requests in {live['seconds']:.0f} s of real time at confidence {live['confidence']:g} "
        f"({live['tokens_per_kv']:.2f} tokens per KV), {live['steps']} steps. The machine took {live['slowdown']:.2f} "
        "times the measured cost of a step meanwhile; `adjusted` is simulated with that."
    )
    columns = {"figure": "seconds", "live": "real", "simulated": "simulated", "adjusted": "adjusted", "error": "error"}
    return f"## In real time\n\n{text}\n\n{table(rows, columns)}"
