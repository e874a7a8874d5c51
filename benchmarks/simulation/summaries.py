"""Figures of a replay, and tables of figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hamburger.engine.types.config import EngineConfig
from simulation.simulator import Outcome, Replay

QUARTERS = ("shortest", "short", "long", "longest")


@dataclass(frozen=True, slots=True)
class Target:
    """What a request must keep to count as goodput: seconds to its first token, and a token after that."""

    ttft: float
    tpot: float

    def holds(self, outcome: Outcome) -> bool:
        return outcome.ttft <= self.ttft and not outcome.tpot > self.tpot


def summary(replay: Replay, config: EngineConfig, target: Target) -> dict[str, Any]:
    """Rates are a second, times are seconds, memory is slots; all figures of one replay that the report may use.

    cached_share: of all prompt tokens, those found in the prefix cache when the request first ran. replayed_share: of
    all computed slots, those that were computed before. out_of_order: requests that began before one that came earlier.
    """
    outcomes, seconds = replay.outcomes, replay.seconds
    tokens, groups = sum(o.tokens for o in outcomes), sum(len(o.group_sizes) for o in outcomes)
    held = groups - sum(o.dropped_slots for o in outcomes)
    prompt_tokens = sum(o.row.prompt_tokens for o in outcomes)
    computed = replay.prompt_slots + groups - len(outcomes)
    begun = [o.scheduled for o in outcomes]
    return {
        "requests": len(outcomes),
        "seconds": seconds,
        "requests_per_second": len(outcomes) / seconds,
        "goodput": sum(map(target.holds, outcomes)) / seconds,
        "good_share": sum(map(target.holds, outcomes)) / len(outcomes),
        "tokens_per_second": tokens / seconds,
        "tokens_per_kv": tokens / held,
        **latencies(outcomes),
        "preemptions": replay.preemptions,
        "preemptions_per_request": replay.preemptions / len(outcomes),
        "replayed_share": replay.replayed_slots / computed,
        "cached_share": sum(o.cached_slots for o in outcomes) / prompt_tokens,
        "peak_slots": max(moment.used_slots for moment in replay.moments),
        "mean_slots": _mean_over_time(replay, "used_slots"),
        "peak_answer_slots": max(moment.answer_slots for moment in replay.moments),
        "mean_answer_slots": _mean_over_time(replay, "answer_slots"),
        "mean_running": _mean_over_time(replay, "running"),
        "peak_waiting": max(moment.waiting for moment in replay.moments),
        "total_slots": config.total_slots,
        "out_of_order": sum(late < early for early, late in pairwise(begun)),
        "passed_over": max(o.passed_over for o in outcomes),
        "by_prompt_length": by_prompt_length(outcomes),
    }


def latencies(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Times to the first token, a token after it, and the longest gap between two groups of a request."""
    ttft, gaps = [o.ttft for o in outcomes], [o.longest_gap for o in outcomes]
    tpot = [o.tpot for o in outcomes if o.tokens > 1]
    return {
        **{f"ttft_p{q}": _percentile(ttft, q) for q in (50, 90, 99)},
        **{f"tpot_p{q}": _percentile(tpot, q) for q in (50, 90, 99)},
        "ttft_mean": float(np.mean(ttft)),
        "tpot_mean": float(np.mean(tpot)) if tpot else 0.0,
        "gap_p99": _percentile(gaps, 99),
    }


def by_prompt_length(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The requests in four parts of the same size, by the length of their prompts."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.row.prompt_tokens)
    parts = [ordered[len(ordered) * i // 4 : len(ordered) * (i + 1) // 4] for i in range(4)]
    return [
        {
            "part": name,
            "longest_prompt": part[-1].row.prompt_tokens,
            "wait_p99": _percentile([o.scheduled - o.arrival for o in part], 99),
            **latencies(part),
        }
        for name, part in zip(QUARTERS, parts, strict=True)
        if part
    ]


def _percentile(values: Iterable[float], q: float) -> float:
    listed = [*values]
    return float(np.percentile(listed, q)) if listed else 0.0


def _mean_over_time(replay: Replay, name: str) -> float:
    """A moment's state lasts until the next one; the time before the first step counts as nothing in use."""
    times = np.array([moment.time for moment in replay.moments])
    values = np.array([getattr(moment, name) for moment in replay.moments])
    held = float((values[:-1] * np.diff(times)).sum())
    return held / float(times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else float(values.mean())


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table: columns is key -> heading; numbers are right-aligned, floats have three digits that count."""
    numeric = {key: bool(rows) and isinstance(rows[0][key], int | float) for key in columns}
    lines = [
        "| " + " | ".join(columns.values()) + " |",
        "| " + " | ".join("---:" if numeric[key] else "---" for key in columns) + " |",
    ]
    lines += ["| " + " | ".join(_cell(row[key]) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def config_json(config: EngineConfig) -> dict[str, Any]:
    """The settings that a replay ran with; what does not end is left out."""
    return {key: value for key, value in asdict(config).items() if key != "max_queue_seconds"}
