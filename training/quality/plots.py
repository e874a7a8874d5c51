"""The curve and the reliability diagram, as PNG files. Figure objects only: nothing global, no screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hamburger.training.quality.points import ALL, Bin, Point
from hamburger.training.quality.verdict import (
    MAX_DIAL_SHORTFALL,
    MAX_EOS_DIFFERENCE,
    MAX_NLL_DIFFERENCE,
    MAX_REPETITION_QUOTIENT,
    MIN_DIAL_TOKENS,
)
from hamburger.training.statistics import Interval

_PANELS = {
    "nll": "nats a token under the base",
    "repetition": "4-gram repetition, %",
    "eos": "answers that end with EOS, %",
}
_PERCENT = ("repetition", "eos")


def plot_curve(path: Path, title: str, base: Point, points: Sequence[Point], default: float) -> None:
    """Quality against tokens per KV, one point a confidence, beside the untouched base. Writes a PNG file."""
    figure = _figure(15, 4.6)
    for index, (name, label) in enumerate(_PANELS.items(), start=1):
        axes = figure.add_subplot(1, len(_PANELS), index)
        _curve(axes, name, base, points, default)
        axes.set_xlabel("tokens per KV entry")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    figure.savefig(path)


def plot_reliability(path: Path, title: str, bins: Mapping[str, Sequence[Bin]], points: Sequence[Point]) -> None:
    """Left: predicted against true, by micro-step position. Right: the same by confidence. Writes a PNG file."""
    figure = _figure(11, 5)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for axes, limit in ((left, "predicted"), (right, "confidence")):
        axes.plot([0, 1], [0, 1], color="0.6", lw=1, label=f"equal to the {limit}")
        axes.plot(
            [0, 1], [-MAX_DIAL_SHORTFALL, 1 - MAX_DIAL_SHORTFALL], color="tab:red", lw=1, ls="--", label="allowed"
        )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_ylabel("mean base probability of accepted tokens")
        axes.grid(alpha=0.3)
    for name, found in bins.items():
        solid = [b for b in found if b.count >= MIN_DIAL_TOKENS]
        left.plot([b.predicted for b in solid], [b.probability for b in solid], "o-", ms=4, label=_position(name))
        dials = [(p.confidence, p.dial[name]) for p in points if p.confidence is not None and name in p.dial]
        dials = [(c, dial) for c, dial in dials if dial.count >= MIN_DIAL_TOKENS]
        values = [dial.probability for _, dial in dials]
        x, y = [c for c, _ in dials], [v.value for v in values]
        right.errorbar(x, y, _bars(values), fmt="o-", ms=4, capsize=2, label=_position(name))
    left.set_xlabel("predicted continue-probability (all confidences)")
    right.set_xlabel("confidence c")
    for axes in (left, right):
        axes.legend(loc="lower right", frameon=False)
    figure.suptitle(title)
    figure.savefig(path)


def _curve(axes: Axes, name: str, base: Point, points: Sequence[Point], default: float) -> None:
    scale = 100 if name in _PERCENT else 1
    groups: dict[str, list[Point]] = {
        "the untouched base": [base],
        "the model, by confidence": [p for p in points if p.confidence != default],
        "its default confidence": [p for p in points if p.confidence == default],
    }
    line = [(p.figures["tokens_per_kv"].value, scale * p.figures[name].value) for p in points]
    axes.plot([x for x, _ in line], [y for _, y in line], color="tab:blue", lw=1, alpha=0.5)
    for (label, members), style in zip(groups.items(), ("ks", "o", "*"), strict=True):
        x = [p.figures["tokens_per_kv"] for p in members]
        y = [p.figures[name] for p in members]
        axes.errorbar(
            [i.value for i in x],
            [scale * i.value for i in y],
            yerr=[[scale * e for e in side] for side in _bars(y)],
            xerr=_bars(x),
            fmt=style,
            color=None if style == "ks" else "tab:orange" if style == "*" else "tab:blue",
            ms=12 if style == "*" else 6,
            capsize=2,
            elinewidth=0.8,
            label=label,
        )
        for point, a, b in zip(members, x, y, strict=True):
            if point.confidence is not None:
                text = f"{point.confidence:g}"
                axes.annotate(text, (a.value, scale * b.value), xytext=(5, 5), textcoords="offset points", fontsize=8)
    for limit in _limits(name, base.figures[name].value):
        axes.axhline(scale * limit, color="tab:red", lw=1, ls="--", label="allowed")


def _limits(name: str, base: float) -> list[float]:
    if name == "nll":
        return [base + MAX_NLL_DIFFERENCE]
    if name == "repetition":
        return [base * MAX_REPETITION_QUOTIENT]
    return [base - MAX_EOS_DIFFERENCE, base + MAX_EOS_DIFFERENCE]


def _bars(intervals: Sequence[Interval]) -> list[list[float]]:
    """Lengths below and above; a percentile interval may leave its value out, and a bar has no negative length."""
    return [[max(0.0, i.value - i.low) for i in intervals], [max(0.0, i.high - i.value) for i in intervals]]


def _position(name: str) -> str:
    return "all positions" if name == ALL else f"position {name}"


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
