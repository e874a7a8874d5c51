"""What compare.py leaves behind: results.json, table.md and two plots. It only arranges what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from comparison.figures import Cell, Ratio, medians, ratios

RESULTS, TABLE = "results.json", "table.md"
MARGIN = 1.25  # of the plots: a factor, as their scales are logarithmic
RATIO_FIGURES = {
    "tokens_per_second": "all output tokens, prefill included",
    "decode_tokens_per_second": "decode only",
}
# figure -> heading, factor, decimals
COLUMNS: Mapping[str, tuple[str, float, int]] = {
    "tokens_per_second": ("tok/s", 1, 1),
    "decode_tokens_per_second": ("decode tok/s", 1, 1),
    "ttft_p50": ("TTFT p50, ms", 1000, 0),
    "ttft_p99": ("p99", 1000, 0),
    "tpot_p50": ("TPOT p50, ms", 1000, 1),
    "tpot_p99": ("p99", 1000, 1),
    "tokens_per_kv": ("tokens per KV", 1, 2),
    "slots_mean": ("slots, mean", 1, 0),
    "slots_peak": ("peak", 1, 0),
    "peak_memory_mib": ("memory, MiB", 1, 0),
    "limit_fraction": ("of the limit", 100, 0),
}


@dataclass(slots=True)
class Results:
    """A run, as far as it has come. ours: entries whose ratios to all others are told. bandwidths: bytes/s."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    names: list[str]
    ours: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    bandwidths: list[float] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    @property
    def streams(self) -> list[int]:
        return sorted({cell.streams for cell in self.cells})

    def of(self, streams: int, name: str) -> list[Cell]:
        """One contestant's cells at a number of streams, of all rounds."""
        return [cell for cell in self.cells if cell.streams == streams and cell.name == name]

    def medians(self, cells: Sequence[Cell]) -> dict[str, float | None]:
        """limit_fraction is of the run's best bandwidth: a probe that others slowed is not what the memory can do."""
        return medians(cells, max(self.bandwidths, default=None))

    def ratios(self) -> list[Ratio]:
        return [r for figure in RATIO_FIGURES for r in ratios(self.cells, self.ours, self.names, figure)]

    def write(self, folder: Path) -> None:
        """results.json and table.md; a reader never sees half of one."""
        rows = [
            {"streams": streams, "name": name, **self.medians(self.of(streams, name))}
            for streams in self.streams
            for name in self.names
            if any(cell.figures for cell in self.of(streams, name))
        ]
        value = {
            "settings": self.settings,
            "machine": self.machine,
            "names": self.names,
            "ours": self.ours,
            "facts": self.facts,
            "left_out": self.left_out,
            "bandwidths": self.bandwidths,
            "cells": [cell.to_json() for cell in self.cells],
            "medians": rows,
            "ratios": [asdict(ratio) for ratio in self.ratios()],
        }
        replace_file(folder / RESULTS, json.dumps(value, indent=1))
        replace_file(folder / TABLE, self.table())

    def table(self) -> str:
        """Markdown: figures, ratios, who is missing and what failed."""
        parts = [self._heading()]
        for streams in self.streams:
            parts.append(self._figures(streams))
        for figure, words in RATIO_FIGURES.items():
            parts.append(self._ratios(figure, words))
        if self.left_out:
            parts.append("Left out:\n" + "\n".join(f"- {name}: {why}" for name, why in self.left_out.items()))
        if failed := [cell for cell in self.cells if cell.error]:
            lines = [f"- {c.name}, {c.streams} streams, round {c.round + 1}: {c.error}" for c in failed]
            parts.append("Failed:\n" + "\n".join(lines))
        return "\n\n".join(parts) + "\n"

    @property
    def _rounds(self) -> int:
        return len({cell.round for cell in self.cells})

    def _heading(self) -> str:
        facts = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        bandwidth = (
            f"{max(self.bandwidths) / 1e9:.1f} GB/s read at best" if self.bandwidths else "bandwidth not measured"
        )
        return (
            f"# Beside others\n\n{facts}; {bandwidth}; contexts of {self.settings.get('context')} tokens; medians of "
            f"{self._rounds} round{'s' * (self._rounds > 1)}."
        )

    def _figures(self, streams: int) -> str:
        heads = [heading for heading, _, _ in COLUMNS.values()]
        lines = [row([f"{streams} stream{'s' * (streams > 1)}", *heads]), row(["---", *["---:"] * len(heads)])]
        for name in self.names:
            cells = self.of(streams, name)
            if any(cell.figures for cell in cells):
                found = self.medians(cells)
                lines.append(row([name, *(number(found[key], *COLUMNS[key][1:]) for key in COLUMNS)]))
        return "\n".join(lines) + self._fewer_rounds(streams)

    def _fewer_rounds(self, streams: int) -> str:
        """Whose medians are of fewer rounds than the heading says: it failed, or the run has not come further."""
        measured = {name: sum(cell.figures is not None for cell in self.of(streams, name)) for name in self.names}
        fewer = [f"{name} {count}" for name, count in measured.items() if 0 < count < self._rounds]
        return f"\n\nOf fewer rounds: {', '.join(fewer)}." if fewer else ""

    def _ratios(self, figure: str, words: str) -> str:
        found = {(r.streams, r.name, r.other): r for r in ratios(self.cells, self.ours, self.names, figure)}
        others = [name for name in self.names if any(key[2] == name for key in found)]
        lines = [row([f"ratio, {words}", "streams", *others]), row(["---", "---:", *["---"] * len(others)])]
        for streams in self.streams:
            for name in self.ours:
                if any(key[:2] == (streams, name) for key in found):
                    cells = [_ratio(found.get((streams, name, other))) for other in others]
                    lines.append(row([name, str(streams), *cells]))
        return "\n".join(lines)


def load_results(file: Path) -> Results:
    """A run that was written before. Raises OSError, ValueError, KeyError or TypeError for what is none."""
    value = json.loads(file.read_text(encoding="utf-8"))
    cells = [Cell.from_json(cell) for cell in value["cells"]]
    kept = ("settings", "machine", "names", "ours", "facts", "left_out", "bandwidths")
    return Results(**{key: value[key] for key in kept}, cells=cells)


def plot(results: Results, folder: Path) -> None:
    """speed.png: tokens/s over streams; latency.png: TTFT and time per output token. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    panels = {
        "speed.png": {"tokens_per_second": "tokens/s, with prefill", "decode_tokens_per_second": "tokens/s, decode"},
        "latency.png": {"ttft_p50": "time to first token, s", "tpot_p50": "time per output token, s"},
        "memory.png": {"slots_mean": "KV slots held, mean", "peak_memory_mib": "resident memory, MiB"},
    }
    for file, figures in panels.items():
        drawn, axes = pyplot.subplots(1, len(figures), figsize=(11, 4.5), layout="constrained")
        for axis, (figure, label) in zip(axes, figures.items(), strict=True):
            axis.set_autoscale_on(False)  # the limits are set below
            axis.set(xlabel="streams", ylabel=label, xscale="log", yscale="log")
            values = []
            for name in results.names:
                points = [(s, results.medians(results.of(s, name))[figure]) for s in results.streams]
                known = [(streams, value) for streams, value in points if value is not None]
                values += [value for _, value in known]
                style = "-" if name in results.ours else "--"
                axis.plot([s for s, _ in known], [v for _, v in known], f"o{style}", label=name, markersize=4)
            axis.set_xlim(min(results.streams) / MARGIN, max(results.streams) * MARGIN)
            if values and min(values) > 0:
                axis.set_ylim(min(values) / MARGIN, max(values) * MARGIN)
            axis.set_xticks(results.streams, [str(s) for s in results.streams])
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.minorticks_off()
        axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        drawn.savefig(folder / file, dpi=120)
        pyplot.close(drawn)


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, factor: float, decimals: int) -> str:
    return "" if value is None else f"{value * factor:.{decimals}f}" + (" %" if factor == 100 else "")


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    spread = f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.rounds > 1 else ""
    return f"{ratio.median:.2f}{spread}"


def replace_file(file: Path, text: str) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
