"""Values of a configuration, each checked under its field's name, which the error says. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hamburger.model.checkpoints.sources import CheckpointError

MOST = 2**31 - 1


def whole(
    config: Mapping[str, Any], field: str, where: str, default: int | None = None, *, least: int = 1, most: int = MOST
) -> int:
    """A whole number. default: where it is absent or null; None: it must be there.

    Raises KeyError for a missing field and CheckpointError for another value than one in [least, most].
    """
    value = _value(config, field, default)
    if type(value) is not int or not least <= value <= most:
        raise CheckpointError(f"{where}: {field} is {value!r}: it must be a whole number in [{least}, {most}].")
    return value


def positive(config: Mapping[str, Any], field: str, where: str, default: float | None = None) -> float:
    """A finite number above 0; else as `whole`."""
    value = _value(config, field, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise CheckpointError(f"{where}: {field} is {value!r}: it must be a number above 0.")
    return float(value)


def flag(config: Mapping[str, Any], field: str, where: str, *, default: bool) -> bool:
    """True or false; else as `whole`."""
    value = _value(config, field, default)
    if type(value) is not bool:
        raise CheckpointError(f"{where}: {field} is {value!r}: it must be true or false.")
    return value


def _value(config: Mapping[str, Any], field: str, default: Any) -> Any:
    value = config.get(field)
    if value is None:
        value = config[field] if default is None else default
    return value
