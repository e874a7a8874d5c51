"""Calls as JSON: the schemas of what a model may write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hamburger.engine.grammar.json_schema import parts_of, with_parts
from hamburger.engine.types.errors import InvalidRequest, shown
from hamburger.server.tools.tool_fields import Function

Schema = dict[str, Any]
_NAMES = ("$id", "$anchor", "$dynamicAnchor")  # that a reference may go by, wherever in the whole they stand


def list_of_calls(functions: Sequence[Function], most: int) -> Schema:
    """At least one call, and arguments always follow their function's schema."""
    schemas, calls = _calls([function.arguments_schema() for function in functions], functions, ["arguments"])
    _check_names(schemas)
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}, "$defs": schemas}


def format_or_call(form: Schema | bool | None, functions: Sequence[Function], most: int) -> Schema:
    """A value of another schema (None: any object), or a call, or a list of calls. Arguments follow the schemas of
    strict functions."""
    keys = ["arguments", "parameters"]
    schemas, calls = _calls([function.own_schema() for function in functions], functions, keys)
    schemas["form"] = {"type": "object"} if form is None else _moved(form, "#/$defs/form")
    _check_names(schemas)
    schemas["call"] = {"anyOf": calls}
    options: list[Schema] = [{"$ref": "#/$defs/form"}, {"$ref": "#/$defs/call"}]
    options.append({"type": "array", "minItems": 1, "maxItems": most, "items": {"$ref": "#/$defs/call"}})
    return {"anyOf": options, "$defs": schemas}


def _calls(
    arguments: Sequence[Schema], functions: Sequence[Function], keys: Sequence[str]
) -> tuple[dict[str, Any], list[Schema]]:
    """Of each function what a call of it is, with its arguments under one of these keys. Their schemas move to $defs,
    and their own references with them."""
    schemas: dict[str, Any] = {}
    calls = list[Schema]()
    for i, (function, schema) in enumerate(zip(functions, arguments, strict=True)):
        root = f"#/$defs/tool{i}"
        schemas[f"tool{i}"] = _moved(schema, root)
        for key in keys:
            properties = {"name": {"const": function.name}, key: {"$ref": root}}
            calls.append(
                {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
            )
    return schemas, calls


def _check_names(schemas: Schema) -> None:
    """Raises InvalidRequest for a name by which two schemas call different parts: in one schema it can mean one."""
    found: dict[tuple[str, str], Schema] = {}
    waiting = [*schemas.values()]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            for key in _NAMES:
                name = part.get(key)
                if isinstance(name, str) and found.setdefault((key, name), part) != part:
                    message = f"tools hold different schemas of the {key} {shown(name)}: rename one."
                    raise InvalidRequest(message, "tools")
            waiting += parts_of(part)


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to its own root point to where that is now. One with an `$id` is a root anywhere."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    moved = with_parts(schema, partial(_moved, root=root))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):  # else it is an anchor's name
        moved["$ref"] = root + reference[1:]
    return moved
