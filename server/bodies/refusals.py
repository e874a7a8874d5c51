"""How a field that is not served is refused: which of its values ask for nothing, and what to do instead of others.

A value that asks for nothing (what the API does anyway) passes, and so does null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hamburger.engine.types.errors import InvalidRequest


class Refused(NamedTuple):
    """asks_nothing: of a value. instead: what to do, as the end of a sentence."""

    asks_nothing: Callable[[Any], bool]
    instead: str = "leave it out"


def but(*harmless: Any, instead: str = "leave it out") -> Refused:
    """Any other value is refused. By type too: True == 1 and 0 == False in Python, but not on the wire."""
    return Refused(lambda value: any(type(value) is type(one) and value == one for one in harmless), instead)


def if_on(instead: str = "leave it out") -> Refused:
    """Only false passes."""
    return but(False, instead=instead)


def if_any(instead: str = "leave it out") -> Refused:
    """Only what is empty passes."""
    return but([], {}, "", instead=instead)


def reject_unserved(fields: Mapping[str, Refused], body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for the first field of `body` that asks for something which `fields` says is not served."""
    for name, refused in fields.items():
        value = body.get(name)
        if value is not None and not refused.asks_nothing(value):
            message = f"{name} is not supported by this server with this value: {refused.instead}."
            raise InvalidRequest(message, name)
