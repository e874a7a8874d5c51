"""The folder of a training run: checkpoints that appear whole or not at all, and the way back to the latest.

RUN/recipe.yaml  metrics.jsonl  tensorboard/  latest (a folder's name, written last)
RUN/step-000500/                a model folder that can be served
RUN/step-000500/training/       state.pt: step, optimizer, and what the run was started with
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251  (what torch.load raises; nothing is unpickled)
from typing import Any

import torch
import yaml

from hamburger.training.errors import TrainingError
from hamburger.training.recipe import Recipe

_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """path: the folder, which need not exist yet."""

    path: Path

    def start(self, recipe: Recipe, *, resume: bool) -> None:
        """Make the folder. Raises TrainingError when it already holds a run, unless that is resumed."""
        if not resume:
            self.start_from(resume=False)
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
        write_whole(self.path / "recipe.yaml", text)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The folder for one process alone. Raises TrainingError while another trains into it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TrainingError(f"another process trains into {self.path}: wait for it, or end it.") from error
            yield

    def start_from(self, *, resume: bool) -> Path | None:
        """The checkpoint that a resumed run goes on from, None for a new one.

        Raises TrainingError when a new one would go over another, and when there is nothing to resume.
        """
        latest = self.latest()
        if resume and latest is None:
            raise TrainingError(f"{self.path} holds no checkpoint to resume from: leave out --resume.")
        if not resume and latest is not None:
            raise TrainingError(f"{self.path} already holds a run: go on with --resume, or name another --out.")
        return latest

    def latest(self) -> Path | None:
        """The newest whole checkpoint. Raises TrainingError when the folder it should be in is gone."""
        pointer = self.path / "latest"
        if not pointer.is_file():
            return None
        folder = self.path / pointer.read_text(encoding="utf-8").strip()
        if not (folder / "training" / "state.pt").is_file():
            raise TrainingError(
                f"{pointer} names {folder.name}, which is no whole checkpoint: write another one's name."
            )
        return folder

    def save(self, step: int, write_model: Callable[[Path], None], state: dict[str, Any], keep: int | None) -> Path:
        """Write a checkpoint, then let `latest` name it, then remove all but the newest `keep` (None: nothing).

        Raises OSError, as on a full disk: `latest` then names what it did.
        """
        folder = self.path / f"step-{step:06d}"
        temporary = self.path / f".{folder.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            write_model(temporary)
            (temporary / "training").mkdir()
            _save_state(state, temporary / "training" / "state.pt")
            for path in temporary.rglob("*"):  # what `latest` is to name must outlast a loss of power
                _flush(path)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it would take the little that is left
        write_whole(self.path / "latest", folder.name + "\n")
        for old in self._steps()[:-keep] if keep else []:
            if old != folder:
                shutil.rmtree(old)
        return folder

    def _steps(self) -> list[Path]:
        found = [(int(match[1]), p) for p in self.path.iterdir() if (match := _STEP.fullmatch(p.name))]
        return [path for _, path in sorted(found)]


def write_whole(path: Path, text: str) -> None:
    """A text file that is there as a whole, or as it was. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        _flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _save_state(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error


def _flush(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def read_state(folder: Path, recipe: Recipe, num_examples: int, data_print: str) -> dict[str, Any]:
    """A checkpoint's training state. Raises TrainingError when recipe or data are not those it was written with."""
    path = folder / "training" / "state.pt"
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        raise TrainingError(f"{path} cannot be read ({error}): let `latest` name another checkpoint.") from error
    now, then = recipe.shaping(), _with_defaults(state["recipe"], Recipe().shaping())
    if changed := [name for name in now if now[name] != then.get(name)]:
        why = "; --validation sets validation_share to 0, so give it as then, or leave it out as then"
        raise TrainingError(
            f"the run was started with another {', '.join(changed)}: give the same to --resume, or begin a new run "
            f"from this one with --init {folder}{why if 'validation_share' in changed else ''}."
        )
    if state["num_examples"] != num_examples:
        raise TrainingError(
            f"the run was started with {state['num_examples']} examples, the data has {num_examples}: give the same "
            "--data."
        )
    if state.get("data", data_print) != data_print:  # older states do not say
        raise TrainingError(
            "the run was started with other examples, or the same in another order or in other groups: give the same "
            f"--data in the same order, or begin a new run from this one with --init {folder}."
        )
    return state


def _with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe that was written before it had all of today's fields: what their defaults say was so then."""
    return {
        name: _with_defaults(values.get(name, {}), default) if isinstance(default, dict) else values.get(name, default)
        for name, default in defaults.items()
    }
