"""Where a step's time goes, by streams, beside what its parts take at least. Needs matplotlib (the train extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from roofline.clocked import BOUNDED, PARTS


def plot_parts(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """rows: of step.report, one a number of streams, in order. Drawn on logarithmic axes."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    streams = [row["streams"] for row in rows]
    for index, part in enumerate(PARTS):
        [line] = axes[0].plot(streams, [row["parts_ms"][index] for row in rows], marker="o", ms=3, label=part)
        if part in BOUNDED and rows[0]["bounds_ms"]:
            bounds = [row["bounds_ms"][part] for row in rows]
            axes[0].plot(streams, bounds, ls=":", color=line.get_color())
            shares = [bound / row["parts_ms"][index] for bound, row in zip(bounds, rows, strict=True)]
            axes[1].plot(streams, shares, marker="o", ms=3, color=line.get_color(), label=part)
    axes[0].set(xlabel="streams", ylabel="ms a macro-step (dotted: at least)", xscale="log", yscale="log")
    axes[1].set(xlabel="streams", ylabel="share of the roofline", xscale="log", ylim=(0, 1))
    for axis in axes:
        axis.set_xticks(streams, [str(n) for n in streams])
        axis.minorticks_off()
    axes[0].legend(fontsize=7)
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=85)
    pyplot.close(figure)
