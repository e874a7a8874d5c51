"""Calls that are written as JSON: an object, a list of objects, or objects one behind the other, as far as they are
there. Text in, calls out.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

from hamburger.server.tools.value_ends import Passed, ValueEnds


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text, as far as it is there."""

    name: str
    arguments: str


@dataclass(slots=True)
class Found:
    """Calls from one place on. end: where they end, None if more may come. is_broken: there is no call there."""

    calls: list[ToolCall] = field(default_factory=list)
    end: int | None = None
    is_broken: bool = False


def calls_at(text: str, start: int, names: Collection[str] | None, ends: ValueEnds) -> Found:
    """An object, or a list of objects, or objects with `;` or `,` between them. names: None for any."""
    found, at = Found(), skip(text, start)
    in_list = text.startswith("[", at)
    if in_list:
        at = skip(text, at + 1)
    if at >= len(text):
        return found
    passed = ends.calls.setdefault(start, Passed(at))
    found.calls += passed.calls
    at = passed.at
    while at < len(text):
        if in_list and text[at] == "]":
            found.end, found.is_broken = at + 1, not found.calls
            return found
        call, end, is_broken = _call(text, at, ends)
        if is_broken or (call is not None and names is not None and call.name not in names):
            found.is_broken = not found.calls
            found.end = at if found.calls else None
            return found
        if call is not None:
            found.calls.append(call)
        if end is None:
            return found
        at = skip(text, end)
        if at < len(text) and text[at] in (",;" if not in_list else ","):
            at = skip(text, at + 1)
        elif not in_list and text[at : at + 1] != "{":
            found.end = end
            return found
        if at < len(text) and call is not None:
            passed.add(call, at)
    if found.calls and not in_list:
        found.end = at
    return found


def _call(text: str, at: int, ends: ValueEnds) -> tuple[ToolCall | None, int | None, bool]:
    """The call that an object at `at` is: (the call, once its name is known; its end; whether it cannot be one).

    A call that was sent stays one: where the JSON breaks after its name, it ends. Of a key that is there twice the
    first counts.
    """
    if text[at] != "{":
        return None, None, True
    begin = at
    at, name, arguments = ends.keys.get(begin, (skip(text, at + 1), None, None))
    while at < len(text) and text[at] != "}":
        key_end = ends.of(text, at) if text[at] == '"' else at
        colon = len(text) if key_end is None else skip(text, key_end)
        start = skip(text, colon + 1)
        if colon < len(text) and text[colon] != ":":
            return _made(name, arguments), at, name is None
        if key_end is None or start >= len(text):
            return _made(name, arguments), None, False
        key, end = _string(text[at:key_end]), ends.of(text, start)
        if key == "name" and name is None:
            name = _string(text[start:end]) if end is not None else None
            if text[start] != '"' or (end is not None and name is None):
                return None, None, True
        elif key in ("arguments", "parameters") and arguments is None:
            arguments = _arguments(text, start, end)
        if end is None:
            return _made(name, arguments), None, False
        at = skip(text, end)
        if at < len(text) and text[at] == ",":
            at = skip(text, at + 1)
            if at < len(text):
                ends.keys[begin] = at, name, arguments
        elif at < len(text) and text[at] != "}":
            return _made(name, arguments), at, name is None
    if at >= len(text):
        return _made(name, arguments), None, False
    if name is None:
        return None, None, True
    return ToolCall(name, "{}" if arguments is None else arguments), at + 1, False


def _made(name: str | None, arguments: str | None) -> ToolCall | None:
    return None if name is None else ToolCall(name, arguments or "")


def _arguments(text: str, start: int, end: int | None) -> str:
    """The text of the arguments at `start`; some models write it as a JSON string, which is given once it is whole."""
    if text[start] == '"':
        return "" if end is None else _string(text[start:end]) or "{}"
    if text[start] in "{[":
        return text[start:end]
    return "" if end is None else "{}"  # null, and what no arguments can be


def _string(literal: str) -> str | None:
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return None
    return utf8(value) if isinstance(value, str) else None


def utf8(text: str) -> str:
    """An escape can spell half a surrogate pair, which no UTF-8 has."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def skip(text: str, at: int) -> int:
    """The first place from `at` on that is no white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
