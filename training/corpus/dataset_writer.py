"""Writes a segmented data set (dataset.py says what is in it): part by part, each whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import torch

from hamburger.model.checkpoints.weight_files import write_safetensors
from hamburger.training.corpus.dataset import (
    FORMAT,
    RESPONSE_TENSORS,
    TOKEN_TENSORS,
    VERSION,
    DatasetMeta,
    Example,
    SegmentedDataset,
    part_paths,
    read_meta,
)
from hamburger.training.errors import TrainingError


class DatasetWriter:
    """Adds whole parts to a folder; what is there stays, so that a run that was killed can go on.

    Raises TrainingError when the folder holds another kind of data set, or another process writes it.
    """

    def __init__(self, folder: Path, meta: DatasetMeta) -> None:
        if (folder / "config.json").exists():
            raise TrainingError(
                f"{folder} is a model's folder: name another one, as parts beside its weights spoil it."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = (folder / ".lock").open("w")
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TrainingError(f"{folder} is being written by another process: wait for it or end it.") from error
            for left_over in (folder / "meta.tmp", *folder.glob("part-*.tmp")):
                left_over.unlink(missing_ok=True)
            parts, file = part_paths(folder), folder / "meta.json"
            if parts and not file.exists():
                raise TrainingError(f"{folder} has parts but no meta.json: name another folder.")
            found = read_meta(folder) if file.exists() else meta
            if parts and (different := found.differences(meta)):
                name = different[0]
                raise TrainingError(
                    f"{folder} was made with {name} {getattr(found, name)!r}, not {getattr(meta, name)!r}: repeat "
                    "the options it was made with, or name another folder."
                )
            if not parts:  # an empty data set may become one of other settings
                values = {"format": FORMAT, "version": VERSION, **asdict(meta)}
                _write_whole(file, json.dumps(values, indent=1).encode())
            self.keys = SegmentedDataset(folder).keys
        except BaseException:
            self.close()
            raise

    def write(self, examples: Sequence[Example]) -> Path:
        """Write one part, which appears on disk whole or not at all. Raises TrainingError without examples."""
        if not examples:
            raise TrainingError("a part needs at least one example.")
        parts = part_paths(self.folder)
        number = 1 + int(parts[-1].stem.removeprefix("part-")) if parts else 0
        path = self.folder / f"part-{number:05d}.safetensors"
        lengths = [len(e.token_ids) for e in examples]
        tensors = {"starts": torch.tensor([0, *accumulate(lengths)])}
        for name, dtype in (TOKEN_TENSORS | RESPONSE_TENSORS).items():
            values = [getattr(e, name) for e in examples]
            if all(v is not None for v in values):
                tensors[name] = torch.cat(values).to(dtype).contiguous()
        metadata = {
            "format": FORMAT,
            "ids": json.dumps([e.id for e in examples]),
            "keys": json.dumps([e.key for e in examples]),
        }
        temporary = path.with_suffix(".tmp")
        write_safetensors(temporary, tensors, metadata)
        temporary.replace(path)
        self.keys.update(e.key for e in examples)
        return path

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
