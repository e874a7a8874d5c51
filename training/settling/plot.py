"""What settling loses against the slots that it leaves, a line for each score. A figure object only: no screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_PANELS = {"kl": "KL from the whole model, nats", "nats": "more nats for the text's own tokens"}


def plot(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """found: entries of report.py, one a policy. Bars are their intervals. Writes a PNG file."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (name, label) in enumerate(_PANELS.items(), start=1):
        axes = figure.add_subplot(1, 2, index)
        for score in dict.fromkeys(entry["score"] for entry in found):
            points = sorted((e["tokens_per_slot"], *e["all"][name]) for e in found if e["score"] == score)
            x, value, low, high = zip(*points, strict=True)
            below = [v - at for v, at in zip(value, low, strict=True)]
            above = [at - v for v, at in zip(value, high, strict=True)]
            axes.errorbar(x, value, yerr=(below, above), marker="o", ms=4, capsize=3, label=score)
        axes.set_xlabel("tokens a slot")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)
