"""What `--confidence auto` buys on a trace: the default, the dial, and its lower bound, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hamburger.engine.dial.confidence_dial import ConfidenceDial
from simulation.simulator import Dialled, DrawnSizes, replay
from simulation.studies import Scenario, Studies
from simulation.summaries import summary, table
from simulation.traces import Trace

LOADS = (0.7, 0.85, 1.0)


def dial_study(
    studies: Studies, trace: Trace, capacity: float, model: Scenario, sizes: Mapping[float, DrawnSizes], target: float
) -> list[dict[str, Any]]:
    """One row for each load and way. sizes: the model's groups at each level of the dial. target: seconds a token.

    token_shares: of all tokens, those that were emitted at each confidence. mean_confidence: of tokens.
    """
    high, low, rows = max(sizes), min(sizes), []
    for load in LOADS:
        timed = trace.at_rate(load * capacity)
        for way in ("default", "auto", "floor"):
            studies.say(f"{trace.name}: load {load:g}, confidence {way}")
            bound = high if way == "default" else low
            dial = ConfidenceDial(low, high, target)
            dialled = Dialled(dial, sizes)
            result = replay(timed, studies.config, model.costs, dialled if way == "auto" else sizes[bound])
            tokens: Counter[float] = Counter()
            for outcome in result.outcomes:
                tokens[dialled.chosen.get(outcome.row.request_id, bound)] += outcome.tokens
            rows.append(
                {
                    "trace": trace.name,
                    "load": load,
                    "way": f"auto, {high:g} to {low:g}" if way == "auto" else f"{way}, {bound:g}",
                    "mean_confidence": sum(c * n for c, n in tokens.items()) / tokens.total(),
                    "token_shares": {f"{c:g}": n / tokens.total() for c, n in sorted(tokens.items(), reverse=True)},
                    **summary(result, studies.config, studies.target),
                }
            )
    return rows


def dial_tables(rows: list[dict[str, Any]], target: float) -> str:
    shown = [
        {
            **row,
            "good_share": 100 * row["good_share"],
            "shares": ", ".join(f"{c}: {share:.0%}" for c, share in row["token_shares"].items()),
        }
        for row in rows
    ]
    columns = {
        "trace": "trace",
        "load": "load",
        "way": "confidence",
        "good_share": "good requests, %",
        "ttft_p50": "TTFT p50, s",
        "ttft_p99": "p99",
        "tpot_p50": "TPOT p50, s",
        "tpot_p99": "p99",
        "tpot_mean": "mean",
        "tokens_per_kv": "tokens per KV",
        "shares": "tokens by confidence",
    }
    return f"## Confidence auto\n\nTarget {target:g} s a token.\n\n{table(shown, columns)}"
