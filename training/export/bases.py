"""What an exported folder calls its base in config.json, and in its card."""

from __future__ import annotations

import os
from pathlib import Path

from hamburger.model.checkpoints.sources import EMBEDDED_BASE, ModelSource, folder_name, read_json


def named_base(source: ModelSource) -> str | None:
    """The base as a HAMburger folder names it; None where it names none."""
    if source.kind != "hamburger" or source.base_path is None:
        return None
    return str(read_json(source.path / "config.json")["base"])


def shown_base(named: str | None, source: ModelSource) -> str | None:
    """A folder by its name: where it lies on this machine says nothing to others."""
    if named is None or source.base_path is None or not _is_folder(named, source):
        return named
    return folder_name(str(source.base_path))


def _is_folder(named: str, source: ModelSource) -> bool:
    return named != EMBEDDED_BASE and ((source.path / named).is_dir() or Path(named).expanduser().is_dir())


def base_reference(named: str, source: ModelSource, out: Path) -> str:
    """What the new config.json calls the base: a folder by its way from there, anything else by its name."""
    if source.base_path is None or not _is_folder(named, source):
        return named
    return os.path.relpath(source.base_path.resolve(), out)
