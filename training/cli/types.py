"""The argparse types of the training commands: each names the mistake. No torch."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path


def whole(low: int) -> Callable[[str], int]:
    """The type of a whole number from `low` up."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} up")
        return int(text)

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """The type of a finite number in [low, high]."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            bounds = f"from {low:g} up" if high == math.inf else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}")
        return value

    return parse


def layers(text: str) -> int | tuple[int, ...]:
    """The type of a number of layers, or of ascending layers counted from 0 (7,14,29)."""
    if "," not in text:
        return whole(0)(text)
    named = tuple(whole(0)(part) for part in text.split(","))
    if list(named) != sorted(set(named)):
        raise argparse.ArgumentTypeError(f"{text!r}: layers must ascend")
    return named


def out_folder(text: str) -> Path:
    """The type of a folder to write; nothing is made yet."""
    return _place(Path(text), "folder", "file")


def out_file(text: str) -> Path:
    """The type of a file to write; nothing is made yet."""
    return _place(Path(text), "file", "folder")


def confidences(text: str) -> list[float]:
    """The type of different numbers in [0, 1] with commas between them; ascending."""
    return sorted({number(0, 1)(part.strip()) for part in text.split(",")})


def confidence_range(text: str) -> list[float]:
    """The type of one confidence, or of the lowest and the highest; ascending."""
    found = confidences(text)
    if len(found) > 2:
        raise argparse.ArgumentTypeError(f"{text} names {len(found)} confidences: name the lowest and the highest")
    return found


def _place(path: Path, wanted: str, other: str) -> Path:
    """A place that cannot be written is found before the work, which may take hours, and not after it."""
    try:
        there = next((p for p in (path, *path.parents) if p.exists()), Path())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from error
    if there == path and path.is_dir() != (wanted == "folder"):
        raise argparse.ArgumentTypeError(f"{path} is a {other}: name a {wanted}")
    if there != path and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be made, as {there} is a file: name another {wanted}")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: no permission for {there}")
    return path
