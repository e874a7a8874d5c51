"""What gpu.py leaves behind: results.json, table.md and two plots. It only arranges what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compare_figures import Cell, medians, ratios
from compare_report import COLUMNS, MARGIN, number, replace_file, row
from gpu_parity import Parity
from gpu_stages import (
    COMPILED_STAGE,
    FLASHINFER,
    FUSED,
    FUSED_SINGLE,
    OURS,
    OURS_COMPILED,
    OURS_FP8,
    OURS_INT8,
    PEER,
    PLAIN,
    PLAIN_COMPILED,
    PLAIN_FP8,
    PLAIN_INT8,
    Stage,
)

RESULTS, TABLE, PLOTS = "results.json", "table.md", ("streams.png", "contexts.png")
COMPARED = (OURS, FUSED, OURS_FP8, OURS_INT8, OURS_COMPILED, FUSED_SINGLE, FLASHINFER)
NOTES = {
    COMPILED_STAGE: "The line to beat: the reference's port of GPT-Fast (torch.compile, one stream, greedy) went from "
    "34 tokens/s of its base to 56 to 75 on its machine, 1.65 to 2.21 times as many."
}
SHOWN = ("tokens_per_second", "decode_tokens_per_second", "ttft_p50", "tpot_p50", "tokens_per_kv", "limit_fraction")


@dataclass(slots=True)
class Results:
    """A run, as far as it has come. machine: what gpu_probe found. cells: by stage, each with its lengths."""

    settings: dict[str, Any]
    machine: dict[str, Any] | None = None
    parity: Parity | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[str, list[Cell]] = field(default_factory=dict)

    def add(self, stage: Stage, cell: Cell) -> None:
        """A cell takes the place of one with the same key."""
        self.stages[stage.name] = asdict(stage)
        others = [other for other in self.cells.get(stage.name, []) if other.key != cell.key]
        self.cells[stage.name] = [*others, cell]

    def done(self, stage: Stage) -> set[tuple[int, int, str]]:
        return {cell.key for cell in self.cells.get(stage.name, []) if cell.figures is not None}

    def is_done(self, stage: Stage) -> bool:
        missing = {name for name in stage.contestants if name not in self.left_out}
        wanted = {(stage.streams, round_, name) for round_ in range(stage.rounds) for name in missing}
        return wanted <= self.done(stage)

    def write(self, folder: Path) -> None:
        """results.json and table.md; a reader never sees half of one."""
        value = asdict(self) | {"cells": {name: [c.to_json() for c in cells] for name, cells in self.cells.items()}}
        replace_file(folder / RESULTS, json.dumps(value, indent=1))
        replace_file(folder / TABLE, self.table())

    def table(self) -> str:
        """Markdown: the machine, the tests, every stage's figures and ratios, who is missing and what failed."""
        parts = [self._heading(), self._tests()]
        parts += [self._stage(name) for name in self.stages]
        if self.left_out:
            parts.append("Left out:\n" + "\n".join(f"- {name}: {why}" for name, why in self.left_out.items()))
        failed = [(name, cell) for name, cells in self.cells.items() for cell in cells if cell.error]
        if failed:
            parts.append("Failed:\n" + "\n".join(f"- {name}, {c.name}: {c.error}" for name, c in failed))
        return "\n\n".join(parts) + "\n"

    def _heading(self) -> str:
        machine, settings = self.machine or {}, self.settings
        name = machine.get("name", "CPU") if machine else "unknown"
        said = f"{name} ({settings['device']}), torch {machine.get('torch', '?')}"
        if machine:
            said += (
                f"; {machine['read'] / 1e9:.0f} GB/s read, {machine['copied'] / 1e9:.0f} GB/s copied, "
                f"{machine['bfloat16_rate'] / 1e12:.2g} TFLOP/s in bfloat16"
            )
        return (
            f"# On {name}\n\n{said}. {settings['geometry']} with random weights in {settings['dtype']}, every group of "
            f"{settings['group']} tokens; begun {settings['date']}."
        )

    def _tests(self) -> str:
        parity = self.parity
        if parity is None:
            return "Parity tests: not run."
        said = f"Parity tests: {parity.passed} passed, {parity.failed} failed, {parity.skipped} skipped."
        if parity.error is not None:
            said = f"Parity tests: {parity.error}." if not parity.finished else f"{said} More to come: {parity.error}."
        return "\n".join([said, *(f"- {line}" for line in parity.failures)])

    def _stage(self, name: str) -> str:
        stage, cells = self.stages[name], self.cells[name]
        lengths = f"prompts of {stage['prompt']} and answers of {stage['output']} tokens"
        rounds = len({cell.round for cell in cells if cell.figures})
        lines = [f"## {name}: {lengths}, {rounds} round{'s' * (rounds != 1)}\n"]
        lines.append(row(["", *(COLUMNS[key][0] for key in SHOWN)]))
        lines.append(row(["---", *["---:"] * len(SHOWN)]))
        for contestant in stage["contestants"]:
            own = [cell for cell in cells if cell.name == contestant]
            if any(cell.figures for cell in own):
                found = medians(own)
                lines.append(row([contestant, *(number(found[key], *COLUMNS[key][1:]) for key in SHOWN)]))
        said = [
            f"{r.name} over {r.other}: {r.median:.2f}" + (f" ({r.low:.2f} to {r.high:.2f})" if r.rounds > 1 else "")
            for r in ratios(cells, COMPARED, stage["contestants"], "decode_tokens_per_second")
        ]
        note = f"\n\n{NOTES[name]}" if name in NOTES else ""
        return "\n".join(lines) + ("\n\nDecode: " + "; ".join(said) + "." if said else "") + note


def load_results(file: Path) -> Results:
    """A run that was written before. Raises OSError, ValueError, KeyError or TypeError for what is none."""
    value = json.loads(file.read_text(encoding="utf-8"))
    value["cells"] = {name: [Cell.from_json(cell) for cell in cells] for name, cells in value["cells"].items()}
    value["parity"] = None if value["parity"] is None else Parity(**value["parity"])
    return Results(**value)


def plot(results: Results, folder: Path) -> None:
    """streams.png and contexts.png: decode tokens/s over the number of streams, and over the context of one stream.
    Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    machine = (results.machine or {}).get("name", "CPU")
    title = f"{machine}, {results.settings['geometry']}"
    first = next((stage for stage in results.stages.values() if stage["streams"] == 1), None)
    panels = {
        PLOTS[0]: ("streams", [s for s in results.stages.values() if first and s["prompt"] == first["prompt"]]),
        PLOTS[1]: ("prompt", [s for s in results.stages.values() if s["streams"] == 1]),
    }
    for file, (key, chosen) in panels.items():
        drawn, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for name in (*COMPARED[:-1], PLAIN, PLAIN_FP8, PLAIN_INT8, PLAIN_COMPILED, PEER):
            points = _points(results, chosen, name, key)
            axis.plot([x for x, _ in points], [y for _, y in points], "o-", label=name, markersize=4)
        axis.set(xscale="log", yscale="log", ylabel="decode tokens/s", title=title)
        axis.set(xlabel="streams" if key == "streams" else "tokens of the prompt, one stream")
        ticks = sorted({stage[key] for stage in chosen})
        if ticks:
            axis.set_xlim(ticks[0] / MARGIN, ticks[-1] * MARGIN)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.legend(fontsize="small")
        drawn.savefig(folder / file, dpi=120)
        pyplot.close(drawn)


def _points(results: Results, stages: Sequence[dict[str, Any]], name: str, key: str) -> list[tuple[int, float]]:
    """(x, decode tokens/s) of a contestant; the first of several stages with the same x."""
    found: dict[int, float] = {}
    for stage in stages:
        cells = [cell for cell in results.cells[stage["name"]] if cell.name == name]
        value = medians(cells)["decode_tokens_per_second"]
        if value is not None:
            found.setdefault(stage[key], value)
    return sorted(found.items())
