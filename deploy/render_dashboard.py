"""Draws the panels of a Grafana dashboard with matplotlib, from what a running Prometheus has: one PNG, no Grafana.

    python deploy/render_dashboard.py http://127.0.0.1:9090 --minutes 8 --out dashboard.png

Every panel's queries are asked for the time shown and drawn where the dashboard puts the panel. Colours and fonts are
matplotlib's: it shows the data, not Grafana. Needs matplotlib (the extra `train`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from check_dashboard import ask
from dashboard import DASHBOARD, WIDTH

POINTS = 160  # of a line
UNIT_INCHES, DPI = (0.62, 0.21), 80  # of one cell of Grafana's grid
COLOURS = 128  # of the PNG


@dataclass(frozen=True, slots=True)
class Span:
    """The time shown, in seconds since 1970, and how often the server was scraped."""

    start: float
    end: float
    scrape_seconds: float

    @property
    def step(self) -> float:
        return max(self.scrape_seconds, math.ceil((self.end - self.start) / POINTS))

    def filled_in(self, expression: str) -> str:
        """PromQL with Grafana's variables as Grafana fills them."""
        rate = max(4 * self.scrape_seconds, self.step + self.scrape_seconds)
        values = {
            "$__rate_interval": f"{rate:.0f}s",
            "$__range": f"{self.end - self.start:.0f}s",
            "$model": ".*",
            "$instance": ".*",
        }
        for name, value in values.items():
            expression = expression.replace(name, value)
        return expression


@dataclass(frozen=True, slots=True)
class Line:
    """One series: its legend, seconds from the start, and values (NaN where there are none)."""

    legend: str
    seconds: list[float]
    values: list[float]


def series(prometheus: str, target: dict[str, Any], span: Span) -> list[Line]:
    """What a query of a panel gives over the span, with every step in it. Raises OSError."""
    query = span.filled_in(target["expr"])
    found = ask(prometheus, "query_range", query=query, start=span.start, end=span.end, step=f"{span.step:g}s")[
        "result"
    ]
    steps = [i * span.step for i in range(math.floor((span.end - span.start) / span.step) + 1)]
    lines = []
    for one in found:
        at = {round((float(when) - span.start) / span.step): float(value) for when, value in one["values"]}
        legend = target["legendFormat"]
        for label, value in one["metric"].items():
            legend = legend.replace(f"{{{{{label}}}}}", value)
        lines.append(Line(legend, steps, [at.get(i, math.nan) for i in range(len(steps))]))
    return lines


def in_unit(value: float, unit: str) -> str:
    """A number for people."""
    if not math.isfinite(value):
        return "–"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def bucket_counts(lines: list[Line]) -> tuple[list[str], list[list[float]]]:
    """The cumulative buckets of a histogram as counts of their own, smallest first; without the empty ones on top."""
    ordered = sorted(lines, key=lambda line: float(line.legend.replace("+Inf", "inf")))
    counts = [ordered[0].values] if ordered else []
    counts += [[max(b - a, 0.0) for a, b in zip(one.values, two.values, strict=True)] for one, two in pairwise(ordered)]
    used = [i for i, row in enumerate(counts) if any(value > 0 for value in row)]
    most = max(used, default=-1) + 1
    return [line.legend for line in ordered[:most]], counts[:most]


def draw_panel(axes: Any, panel: dict[str, Any], lines: list[Line], minutes: float) -> None:
    """One panel, by its type."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.set_title(panel["title"], fontsize=8, loc="left", pad=3)
    axes.tick_params(labelsize=6, length=2, pad=1.5)
    for side in axes.spines.values():
        side.set_color("#cccccc")
    if panel["type"] == "stat":
        axes.set_xticks([])
        axes.set_yticks([])
        values = [value for line in lines for value in line.values if math.isfinite(value)]
        if values:
            axes.fill_between(range(len(values)), values, color="#d9e8f5", linewidth=0)
            axes.set_ylim(0, max(values) * 2 or 1)
        text = in_unit(values[-1] if values else math.nan, unit)
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=15, color="#1f5f99")
        return
    axes.set_xlim(0, minutes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel["type"] == "heatmap":
        names, counts = bucket_counts(lines)
        names = [name.removesuffix(".0") for name in names]
        if counts:
            at = [seconds / 60 for seconds in lines[0].seconds]
            axes.pcolormesh(at, range(len(names)), counts, cmap="Oranges", shading="nearest", vmin=0)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylabel(panel["options"]["yAxis"]["axisLabel"], fontsize=6, labelpad=1)
        return
    at = [seconds / 60 for seconds in lines[0].seconds] if lines else []
    custom = panel["fieldConfig"]["defaults"]["custom"]
    if custom["stacking"]["mode"] == "normal" and lines:
        rows = [[value if math.isfinite(value) else 0.0 for value in line.values] for line in lines]
        axes.stackplot(at, rows, labels=[line.legend for line in lines], alpha=0.75, linewidth=0)
    else:
        for line in lines:
            axes.plot(at, line.values, label=line.legend, linewidth=1)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.2 or 1)  # room for the legend
    axes.grid(color="#eeeeee", linewidth=0.5)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_unit(value, unit)))
    if lines:
        axes.legend(
            fontsize=6,
            frameon=False,
            ncols=4,
            loc="upper left",
            handlelength=1,
            columnspacing=1,
        )


def render(prometheus: str, dashboard: dict[str, Any], span: Span, out: Path) -> list[str]:
    """Draw all panels into `out`; returns the titles of those without any number. Raises OSError."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from PIL import Image

    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 2
    figure = pyplot.figure(figsize=(WIDTH * UNIT_INCHES[0], height * UNIT_INCHES[1]), dpi=DPI)
    empty = []
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / WIDTH, 1 - (place["y"] + 2) / height
        if panel["type"] == "row":
            figure.text(0.006, top - 0.8 / height, panel["title"], fontsize=10, weight="bold")
            continue
        lines = [line for target in panel["targets"] for line in series(prometheus, target, span)]
        if not any(math.isfinite(value) for line in lines for value in line.values):
            empty.append(panel["title"])
        is_stat = panel["type"] == "stat"
        margins = (0.008, 0.006, 1.3, 0.4) if is_stat else (0.042, 0.008, 1.4, 1.1)  # left, right; top, bottom in cells
        box = (
            left + margins[0],
            top - (place["h"] - margins[3]) / height,
            place["w"] / WIDTH - margins[0] - margins[1],
            (place["h"] - margins[2] - margins[3]) / height,
        )
        draw_panel(figure.add_axes(box), panel, lines, (span.end - span.start) / 60)
    begin, minutes = datetime.fromtimestamp(span.start, UTC), (span.end - span.start) / 60
    text = f"{dashboard['title']}: {minutes:.0f} minutes from {begin:%Y-%m-%d %H:%M} UTC (x: minutes). "
    text += "Drawn by matplotlib from a Prometheus that scraped a loaded server; not a Grafana screenshot."
    figure.text(0.006, 1 - 1.3 / height, text, fontsize=9)
    figure.savefig(out)
    pyplot.close(figure)
    with Image.open(out) as image:
        image.convert("RGB").quantize(COLOURS).save(out, optimize=True)
    return empty


def main(arguments: list[str]) -> int:
    """Draw; returns an exit status: 1 when a panel had no number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("prometheus", help="its address")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD, help="Grafana's JSON (default: ours)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how much to show (default: 10)")
    parser.add_argument("--end", type=float, default=None, help="until when, in seconds since 1970 (default: now)")
    parser.add_argument("--scrape-seconds", type=float, default=10.0, help="Prometheus' scrape interval (default: 10)")
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"), help="the PNG (default: dashboard.png)")
    args = parser.parse_args(arguments)
    end = time.time() if args.end is None else args.end
    span = Span(end - 60 * args.minutes, end, args.scrape_seconds)
    empty = render(args.prometheus, json.loads(args.dashboard.read_text()), span, args.out)
    for title in empty:
        print(f"no data: {title}", file=sys.stderr)
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
