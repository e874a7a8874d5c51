"""Records a run in metrics.jsonl and TensorBoard, and shows a progress bar, or lines where there is no terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from hamburger.training.run.folder import write_whole

_SECONDS_A_LINE = 30.0


class Journal:
    """Records of one run, from `step` on: what an earlier process wrote of later steps is dropped."""

    def __init__(self, folder: Path, step: int, total: int, console: Console) -> None:
        path = folder / "metrics.jsonl"
        kept = [line for line, record in _records(path) if record["step"] <= step]
        write_whole(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._console = console
        self._last_line = float("-inf")
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=total, completed=step, loss="-", speed="")
        self._total = total

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One training step's numbers; `loss` and `tokens_per_second` are among them."""
        self._write(step, dict(values))
        loss, speed = f"{values['loss']:.4f}", f"{values['tokens_per_second']:,.0f} response tokens/s"
        self._progress.update(self._task, completed=step, loss=loss, speed=speed)
        now = time.monotonic()
        if self._progress.disable and (now - self._last_line >= _SECONDS_A_LINE or step == self._total):
            self._last_line = now
            self._console.print(f"step {step}/{self._total}  loss {loss}  {speed}", highlight=False)

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        """Validation's numbers, nested as they are in metrics.jsonl, flat in TensorBoard."""
        self._write(step, {"validation": dict(values)})

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False)

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in _flat("", values):
            self._board.add_scalar(name, value, step)

    @contextmanager
    def open(self) -> Iterator[Journal]:
        """Show the bar; close the files at the end."""
        try:
            with self._progress:
                yield self
        finally:
            self._file.close()
            self._board.close()


def was_validated(folder: Path, step: int) -> bool:
    """Whether a run's folder has the validation of this step."""
    return any(record["step"] == step and "validation" in record for _, record in _records(folder / "metrics.jsonl"))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file and what they say; those that a killed process or a full disk tore are passed over."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{prefix}/{name}" if prefix else str(name), inner)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _flat(f"{prefix}/{i}", inner)
    elif isinstance(value, (int, float)):
        yield prefix, float(value)
