"""What of a client's JSON Schema llguidance can be given, and how deep it is nested. It knows no grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# llguidance follows references by recursion: some thousand levels would end the process, not raise an error.
MAX_LEVELS = 1000
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
# Fractions of a second, and numbers in durations, may have digits without end in these.
_DIGITS_IN_A_ROW = "^([0-9]{0,9}[^0-9])*[0-9]{0,9}$"
_ENDLESS_FORMATS = frozenset(["date-time", "time", "duration"])


def usable_schema(schema: Any) -> Any:
    """A schema without formats that the library does not know (to JSON Schema they are notes, not rules), and with an
    end to the digits of the others."""
    if isinstance(schema, list):
        return [usable_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {
        key: value if key in ("const", "enum", "default", "examples") else usable_schema(value)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in _FORMATS)
    }
    if isinstance(found := kept.get("format"), str) and found in _ENDLESS_FORMATS:
        kept.setdefault("pattern", _DIGITS_IN_A_ROW)
    return kept


def levels_of(schema: Mapping[str, Any]) -> int:
    """No path through a schema and its references is longer: its depth, and that of each place that is referred to."""
    own, targets = _depth(schema)
    waiting, found = set(targets), dict[str, int]()
    while waiting and own + sum(found.values()) <= MAX_LEVELS:
        pointer = waiting.pop()
        found[pointer], further = _depth(_at(schema, pointer))
        waiting |= further - found.keys()
    return own + sum(found.values())


def _depth(part: Any) -> tuple[int, set[str]]:
    """How deep a part of a schema is nested, and where it refers to. Without recursion: a client chose its depth."""
    deepest, targets, waiting = 1, set[str](), [(part, 1)]
    while waiting:
        value, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(value, Mapping):
            targets |= {value[key] for key in ("$ref", "$dynamicRef") if isinstance(value.get(key), str)}
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]
    return deepest, targets


def _at(schema: Any, pointer: str) -> Any:
    """The part of a schema that a JSON pointer (#/...) leads to; None where it leads to nothing."""
    part = schema
    for name in pointer.lstrip("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and len(name) < 9:
            part = part[int(name)] if int(name) < len(part) else None
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    return part
