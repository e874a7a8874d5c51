"""The settings that a model's probe was fitted for, as its file names them. No torch: `hamburger plan` asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hamburger.model.checkpoints.sources import PROBE_FILE, CheckpointError, ModelSource

SETTINGS = ("settle_window", "settle_growth", "settle_keep")


def probe_file(source: ModelSource) -> Path | None:
    """The one in the model's folder (a file's), or in its base's; None where there is none."""
    folder = source.path if source.path.is_dir() else source.path.parent
    for place in (folder, source.base_path):
        if place is not None and (file := place / PROBE_FILE).is_file():
            return file
    return None


def settle_settings(source: ModelSource) -> dict[str, float]:
    """By name those of SETTINGS that suit the model; {} where nothing was fitted. Raises CheckpointError."""
    file = probe_file(source)
    return {} if file is None else read_settings(file)


def read_settings(file: Path) -> dict[str, float]:
    """Those that a probe's file names. Raises CheckpointError."""
    try:
        with safe_open(file, framework="numpy") as opened:
            told: Mapping[str, str] = opened.metadata() or {}
        found = {name: float(told[name]) for name in SETTINGS if name in told}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    for name, value in found.items():
        least, most = (32, math.inf) if name == "settle_window" else (0, 1)
        if not least <= value < most:
            raise CheckpointError(
                f"{file} names a {name} of {value:g}, which must be in [{least}, {most}): make it anew with `hamburger "
                "fit-settle`, or remove it."
            )
    return found
