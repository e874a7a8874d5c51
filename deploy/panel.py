"""Panel: one panel of the dashboard; and the kinds of panels that it has several of.

In the queries {S} is the choice of servers, with further labels after a comma, and [R] a window that fits the
resolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; each query is PromQL and its legend."""

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    stacked: bool = False


def stat(title: str, text: str, query: str, unit: str = "short") -> Panel:
    """One number."""
    return Panel(title, text, ((query, title.lower()),), unit, "stat")


def quantiles(title: str, text: str, histogram: str, unit: str = "s") -> Panel:
    """A histogram's median and upper percentiles."""
    rate = f"sum by (le) (rate({histogram}_bucket{{S}}[R]))"
    queries = tuple((f"histogram_quantile({q / 100:g}, {rate})", f"p{q}") for q in (50, 90, 95, 99))
    return Panel(title, text, queries, unit)


def by_adapter(title: str, text: str, query: str) -> Panel:
    """An area for each LoRA adapter of the models."""
    named = f'label_replace(sum by (lora_name) ({query}), "lora_name", "-", "lora_name", "")'
    return Panel(title, f"{text} -: the model itself.", ((named, "{{lora_name}}"),), stacked=True)


def by_model(title: str, text: str, query: str, unit: str = "short") -> Panel:
    """One line for each model."""
    return Panel(title, text, ((query, "{{model_name}}"),), unit)


def mean(histogram: str) -> str:
    return f"sum(rate({histogram}_sum{{S}}[R])) / sum(rate({histogram}_count{{S}}[R]))"
