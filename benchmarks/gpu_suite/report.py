"""What gpu.py leaves behind: results.json, table.md and two plots. It only arranges what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from comparison.figures import Cell, medians, ratios
from comparison.report import COLUMNS, MARGIN, number, replace_file, row
from gpu_suite.contestants import process_of
from gpu_suite.parity import FileTests, Parity
from gpu_suite.stages import (
    FORMS_STAGE,
    FUSED,
    OURS,
    OURS_INT8,
    PEER,
    PLAIN,
    PLAIN_INT8,
    UNDRAFTED,
    VERIFIED,
    VERIFIED_STAGE,
    WIDE_GROUPS,
    WIDE_STAGE,
    Forms,
    Stage,
)

RESULTS, TABLE, PLOTS = "results.json", "table.md", ("streams.png", "contexts.png")
COMPARED = (OURS, FUSED, OURS_INT8, VERIFIED, *WIDE_GROUPS)
GIB = 1 << 30
NOTES = {
    WIDE_STAGE: "N of 4: the model could make groups of 4, and each ends by itself after N tokens, which the device "
    f"alone knows. Where N is the group of `{OURS}`, whose max_group it is too, the difference is micro-steps that "
    "nobody needs.",
    VERIFIED_STAGE: "`tokens per KV` are tokens a pass here. Random weights confirm no draft of a micro decoder: what "
    f"they confirm was looked up, where a text repeats itself. Where `{VERIFIED}` over `{UNDRAFTED}` is below 1, "
    "drafts cost more than they brought.",
}
SHOWN = ("tokens_per_second", "decode_tokens_per_second", "ttft_p50", "tpot_p50", "tokens_per_kv", "limit_fraction")


@dataclass(slots=True)
class Results:
    """A run, as far as it has come. machine: what probe.py found. cells: by stage, each with its lengths.

    facts: what each process told when it started. absent: who cannot take part here. starts: seconds, by process.
    forms: lines of decode_step.py. Of the last call alone: failed, why a part did not end well; given_up, contestants
    that failed again and again; to_come, the stages that are not done.
    """

    settings: dict[str, Any]
    machine: dict[str, Any] | None = None
    parity: Parity | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[str, list[Cell]] = field(default_factory=dict)
    forms: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    to_come: list[str] = field(default_factory=list)

    def add(self, stage: Stage, cell: Cell) -> None:
        """A cell takes the place of one with the same key."""
        self.stages[stage.name] = asdict(stage)
        others = [other for other in self.cells.get(stage.name, []) if other.key != cell.key]
        self.cells[stage.name] = [*others, cell]

    def add_form(self, line: dict[str, Any]) -> None:
        if (line["rows"], line["confidence"]) not in self.forms_done():
            self.forms.append(line)

    def done(self, stage: Stage) -> set[tuple[int, int, str]]:
        return {cell.key for cell in self.cells.get(stage.name, []) if cell.figures is not None}

    def forms_done(self) -> set[tuple[int, float]]:
        return {(line["rows"], line["confidence"]) for line in self.forms}

    def is_done(self, stage: Stage | Forms) -> bool:
        if isinstance(stage, Forms):
            return {(rows, c) for rows in stage.rows for c in stage.confidences} <= self.forms_done()
        there = {name for name in stage.contestants if name not in self.absent}
        wanted = {(stage.streams, round_, name) for round_ in range(stage.rounds) for name in there}
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
        if self.forms:
            parts.append(self._forms())
        if self.facts:
            parts.append(self._processes())
        for title, why in (("Left out", self.absent | self.given_up), ("Failed", self._failures())):
            if why:
                parts.append(f"{title}:\n" + "\n".join(f"- {name}: {reason}" for name, reason in why.items()))
        if self.to_come:
            parts.append(f"Not measured yet: {', '.join(self.to_come)}.")
        return "\n\n".join(parts) + "\n"

    def _failures(self) -> dict[str, str]:
        cells = [(name, cell) for name, cells in self.cells.items() for cell in cells if cell.error]
        return self.failed | {f"{name}, {c.name}, round {c.round + 1}": str(c.error) for name, c in cells}

    def _heading(self) -> str:
        machine, settings = self.machine or {}, self.settings
        name = machine.get("name", "CPU") if machine else "unknown"
        said = f"{name} ({settings['device']}), torch {machine.get('torch', '?')}"
        if machine:
            said += (
                f"; {machine['read'] / 1e9:.0f} GB/s read, {machine['copied'] / 1e9:.0f} GB/s copied, "
                f"{machine['bfloat16_rate'] / 1e12:.2g} TFLOP/s in bfloat16"
            )
            if most := machine.get("bandwidth_at_most"):
                said += f"; clock and width of its memory give {most / 1e9:.0f} GB/s at most"
        if settings["device"] == "cpu":
            said += ". A dry run: it shows that the command works, and no speed of a GPU"
        engine = "".join(f", {name} {value}" for name, value in settings["engine"].items())
        return (
            f"# On {name}\n\n{said}. {settings['geometry']} with random weights in {settings['dtype']}{engine}, every "
            f"group of {settings['group']} tokens where nothing else is said; begun {settings['date']}."
        )

    def _tests(self) -> str:
        parity = self.parity
        if parity is None:
            return "Parity tests: not run."
        seconds = sum(file.seconds for file in parity.files.values())
        counts = f"{parity.passed} passed, {parity.failed} failed, {parity.skipped} skipped"
        said = f"Parity tests: {counts}; {len(parity.files)} files, {seconds:.0f} s."
        if parity.error is not None:
            said = f"{said} More to come: {parity.error}." if parity.files else f"Parity tests: {parity.error}."
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
                found = medians(own, float(self.machine["bandwidth"]) if self.machine else None)
                lines.append(row([contestant, *(number(found[key], *COLUMNS[key][1:]) for key in SHOWN)]))
        said = [
            f"{r.name} over {r.other}: {r.median:.2f}" + (f" ({r.low:.2f} to {r.high:.2f})" if r.rounds > 1 else "")
            for r in ratios(cells, COMPARED, stage["contestants"], "decode_tokens_per_second")
            if r.other not in WIDE_GROUPS
        ]
        notes = [note for start, note in NOTES.items() if name == start or name.startswith(f"{start}, ")]
        notes += self._short_pools(stage)
        return (
            "\n".join(lines)
            + ("\n\nDecode: " + "; ".join(said) + "." if said else "")
            + "".join(f"\n\n{note}" for note in notes)
        )

    def _short_pools(self, stage: dict[str, Any]) -> list[str]:
        """Who could not hold all streams at once: what they were measured at is not the number of streams."""
        found = []
        for name in stage["contestants"]:
            process, group = process_of(name)
            single = process.startswith(PLAIN) or process in (VERIFIED, UNDRAFTED)
            tokens = 1 if single else group or self.settings["group"]
            needed = stage["streams"] * (stage["prompt"] + stage["output"] // tokens)
            slots = self.facts.get(process, {}).get("pool_slots")
            if slots is not None and slots < needed:
                found.append(f"{name}'s KV pool held {slots:,} of the {needed:,} slots of all streams: some waited.")
        return found

    def _forms(self) -> str:
        names = list(dict.fromkeys(name for line in self.forms for name in line["milliseconds"]))
        lines = [f"## {FORMS_STAGE}: ms of one step, medians\n"]
        lines.append(row(["rows", "context", "confidence", "tokens per group", *names]))
        lines.append(row(["---:"] * (4 + len(names))))
        for line in self.forms:
            times = (number(line["milliseconds"].get(name), 1, 3) for name in names)
            said = (str(line[key]) for key in ("rows", "context", "confidence", "tokens_per_group"))
            lines.append(row([*said, *times]))
        return "\n".join(lines)

    def _processes(self) -> str:
        lines = ["## Processes\n", row(["", "start, s", "KV pool, slots", "GiB", "asked for, GiB"])]
        lines.append(row(["---", *["---:"] * 4]))
        for name, facts in self.facts.items():
            slots = facts.get("pool_slots")
            sizes = (number(facts.get(key), 1 / GIB, 2) for key in ("pool_bytes", "asked_bytes"))
            lines.append(
                row([name, number(self.starts.get(name), 1, 1), "" if slots is None else f"{slots:,}", *sizes])
            )
        return "\n".join(lines)


def load_results(file: Path) -> Results:
    """A run that was written before. Raises OSError, ValueError, KeyError or TypeError for what is none."""
    value = json.loads(file.read_text(encoding="utf-8"))
    value["cells"] = {name: [Cell.from_json(cell) for cell in cells] for name, cells in value["cells"].items()}
    if (parity := value["parity"]) is not None:
        files = {name: FileTests(**file) for name, file in parity["files"].items()}
        value["parity"] = Parity(files, parity["error"])
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
        lines = {name: _points(results, chosen, name, key) for name in (*COMPARED, PLAIN, PLAIN_INT8, PEER)}
        for name, points in lines.items():
            axis.plot([x for x, _ in points], [y for _, y in points], "o-", label=name, markersize=4)
        axis.set(xscale="log", ylabel="decode tokens/s", title=title)
        if any(lines.values()):  # where nothing could be measured there is nothing to scale
            axis.set(yscale="log")
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
        value = medians(cells, None)["decode_tokens_per_second"]
        if value is not None:
            found.setdefault(stage[key], value)
    return sorted(found.items())
