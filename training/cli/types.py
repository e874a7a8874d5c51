"""The argparse types of the training commands: each names the mistake. No torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


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


def confidences(text: str) -> list[float]:
    """The type of different numbers in [0, 1] with commas between them; ascending."""
    return sorted({number(0, 1)(part.strip()) for part in text.split(",")})
