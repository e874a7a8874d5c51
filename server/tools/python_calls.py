"""Calls that are written as Python, as OLMo 3 and Llama 3.2 do: `add(a=1, b=2)`, in a list or one behind the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hamburger.server.tools.json_calls import Found, ToolCall, calls_at, skip
from hamburger.server.tools.python_values import PythonArguments
from hamburger.server.tools.value_ends import Passed, ValueEnds

Schemas = Mapping[str, Mapping[str, Any]]  # of the functions' arguments, by their names
_CALLED = re.compile(r"([^\W\d][\w.-]*)\s*(\()?")


def python_or_json_calls(text: str, start: int, schemas: Schemas, ends: ValueEnds, *, only_known: bool) -> Found:
    """Calls at one place, in either form, alone or in a list. only_known: names of `schemas` alone make a call."""
    begin = skip(text, start)
    if text.startswith("[", begin):
        begin = skip(text, begin + 1)
    if text.startswith("{", begin):
        return calls_at(text, start, schemas if only_known else None, ends)
    return _python_calls(text, start, schemas, ends, only_known)


def _python_calls(text: str, start: int, schemas: Schemas, ends: ValueEnds, only_known: bool) -> Found:
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
        called = _CALLED.match(text, at)
        if called and not called[2] and called.end() == len(text):
            return found
        if not called or not called[2] or (only_known and called[1] not in schemas):
            found.end, found.is_broken = at if found.calls else None, not found.calls
            return found
        if called.end() not in ends.python:
            properties = schemas.get(called[1], {}).get("properties")
            names = [*properties] if isinstance(properties, Mapping) else []
            ends.python[called.end()] = PythonArguments(called.end(), names)
        arguments = ends.python[called.end()]
        arguments.read(text)
        call = ToolCall(called[1], arguments.json)
        found.calls.append(call)
        if arguments.end is None:
            found.end = arguments.at if arguments.is_broken else None
            return found
        at = skip(text, arguments.end)
        if at < len(text) and text[at] in (",;" if not in_list else ","):
            at = skip(text, at + 1)
        elif in_list and at < len(text) and text[at] != "]":
            found.end = arguments.end
            return found
        if at < len(text):
            passed.add(call, at)
    if found.calls and not in_list:
        found.end = at
    return found
