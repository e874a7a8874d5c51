"""Calls that are written as tags, as Qwen3-Coder does. Text in, a name and JSON out.

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

A value is text: the function's schema says what it is as JSON. Where that is text alone it is given as it grows, else
once it is whole. What comes last may be left out, as models do: `</function>`, if something else follows, and
`</parameter>` before another of the function's parameters, or before the end of the call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from hamburger.engine.grammar.json_schema import part_at
from hamburger.server.tools.json_calls import Found, ToolCall, skip
from hamburger.server.tools.value_ends import GrownText, ValueEnds

FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (f"\n{_PARAMETER_END}", _PARAMETER_END)
_CALL_END = f"\n{_FUNCTION_END}\n</tool_call>"
_KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_NAMED = {kind: kind for kind in _KINDS.values()} | {  # and names of other languages, as tools of clients have them
    "str": "string", "bool": "boolean", "int": "integer", "float": "number", "list": "array", "dict": "object"
}  # fmt: skip
_TEXT = frozenset(["string"])
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some models write them


def tag_call(text: str, at: int, ends: ValueEnds, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    """The call whose `<function=` is at `at`, if it is one. schemas: of the functions' arguments, by their names."""
    begun = at
    name, at = _named(text, at + len(FUNCTION))
    if name is None:
        return Found(is_broken=at >= 0)
    schema = schemas.get(name, {})
    found = schema.get("properties")
    properties: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    parts: dict[str, str]  # of a key that is there twice the first counts
    at, parts = ends.parameters.setdefault(begun, (at, {}))
    while True:
        begin = skip(text, at)
        if text.startswith(_PARAMETER, begin):
            key, start = _named(text, begin + len(_PARAMETER))
            if key is None and start < 0:
                return Found([ToolCall(name, _arguments(parts))])
            if key is not None:
                kinds = _kinds(properties[key], schema) if key in properties else _TEXT
                others = (f"\n{_PARAMETER}{other}>" for other in properties if other not in parts and other != key)
                value, end = _value(text, start, ends, kinds, (_CALL_END, *others))
                part = {key: f"{json.dumps(key, ensure_ascii=False)}: {value}"} if value and key not in parts else {}
                if end is None:
                    return Found([ToolCall(name, _arguments(parts | part))])
                parts |= part
                at = end
                ends.parameters[begun] = at, parts
                continue
        elif text.startswith(_FUNCTION_END, begin):
            return Found([ToolCall(name, _arguments(parts) + "}")], begin + len(_FUNCTION_END))
        elif _may_begin(text, begin):
            return Found([ToolCall(name, _arguments(parts))])
        return Found([ToolCall(name, _arguments(parts) + "}")], at)


def bare_tag_call(text: str, at: int, ends: ValueEnds, schemas: Mapping[str, Mapping[str, Any]]) -> Found:
    """As tag_call, where nothing else says that it is a call: of a function of `schemas`, with what must follow."""
    name, begin = _named(text, at + len(FUNCTION))
    if name is None and begin < 0:
        return Found()
    begin = skip(text, begin)
    if name in schemas and text.startswith((_PARAMETER, _FUNCTION_END), begin):
        return tag_call(text, at, ends, schemas)
    return Found(is_broken=name not in schemas or not _may_begin(text, begin))


def _may_begin(text: str, at: int) -> bool:
    """Whether the text ends at `at`, or with the beginning of a tag that stands in a function."""
    return any(tag.startswith(text[at : at + len(tag)]) for tag in (_PARAMETER, _FUNCTION_END))


def _arguments(parts: Mapping[str, str]) -> str:
    return "{" + ", ".join(parts.values())


def _named(text: str, at: int) -> tuple[str | None, int]:
    """The name that `>` ends, and where it has ended; None, and -1 while it may come, else `at`."""
    end = text.find(">", at)
    name = text[at:] if end < 0 else text[at:end]
    if "\n" in name or "<" in name or not (name or end < 0):
        return None, at
    return (None, -1) if end < 0 else (name, end + 1)


def _value(
    text: str, start: int, ends: ValueEnds, kinds: Collection[str], next_tags: Collection[str]
) -> tuple[str, int | None]:
    """The JSON of the value that begins at `start`, as far as it is there, and where its tag has ended.

    next_tags: what ends it, too, with the line break before.
    """
    is_text = kinds == _TEXT
    if start == len(text):
        return '"' if is_text else "", None
    begin = start + text.startswith("\n", start)
    known = ends.texts.get(start, GrownText(begin, '"' if is_text else ""))
    if known.end is None:
        tags = (*_VALUE_ENDS, *next_tags)
        found = [(at, tag) for tag in tags if (at := text.find(tag, known.reached)) >= 0]
        last, tag = min(found) if found else (_begun(text, known.reached, tags), "")
        value = known.json + _escaped(text[known.reached : last]) if is_text else ""
        known = GrownText(last, value)
        if tag:
            value = value + '"' if is_text else _as_json(text[begin:last], kinds)
            known = GrownText(last, value, last + (len(tag) if tag in _VALUE_ENDS else 1))
        ends.texts[start] = known
    return known.json, known.end


def _begun(text: str, start: int, tags: Collection[str]) -> int:
    """Where, from `start` on, what may be the beginning of a tag stands at the end of the text."""
    for at in range(max(start, len(text) - max(map(len, tags))), len(text)):
        if text[at] in "\n<" and any(tag.startswith(text[at:]) for tag in tags):
            return at
    return len(text)


def _as_json(text: str, kinds: Collection[str]) -> str:
    """A value that is not text alone: JSON of one of these kinds (of none: of any), else a string."""
    told = _PYTHON.get(text.strip(), text.strip())
    try:
        kind = _KINDS[type(json.loads(told, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        kind = "string"
    is_fitting = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return told if kind != "string" and is_fitting else f'"{_escaped(text)}"'


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON.")


def _kinds(schema: Any, root: Mapping[str, Any], levels: int = 4) -> frozenset[str]:
    """The types that a schema lets a value have; empty for any. root: what it refers to. levels: of references, and
    of choices within choices."""
    if not isinstance(schema, Mapping) or not levels:
        return frozenset()
    found = schema.get("type")
    if isinstance(found, str | list):
        named = [kind for kind in ([found] if isinstance(found, str) else found) if isinstance(kind, str)]
        return frozenset(_NAMED[kind] for kind in named) if _NAMED.keys() >= {*named} else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_KINDS[type(value)] for value in values)
    if isinstance(pointer := schema.get("$ref"), str) and pointer.startswith("#/"):
        return _kinds(part_at(root, pointer), root, levels - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            kinds = [_kinds(option, root, levels - 1) for option in options]
            return frozenset().union(*kinds) if all(kinds) else frozenset()
    return frozenset()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
