"""Objects that list their properties and say nothing of others have none but those, as in OpenAI's strict mode.

xgrammar reads them so, too. To JSON Schema they are open, and a small model writes on in them: keys of its own until
the answer is cut. What is allowed here is allowed by the schema, too. Where schemas hold beside each other, one lists
what another does not: then all stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamburger.engine.grammar.json_schema import parts_of, with_parts

# What says something of an object's properties, and what holds beside that.
_OF_OBJECTS = frozenset(
    ["properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties"]
)
_BESIDE = frozenset(["allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"])
_SAY_MORE = _BESIDE | {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties",
    "dependentRequired",
}  # fmt: skip


def closed(schema: Any) -> Any:
    """A schema whose objects are closed, where they can be."""
    return schema if _holds_beside(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = with_parts(schema, _closed)
    listed, required = changed.get("properties"), changed.get("required", [])
    if not isinstance(listed, Mapping) or not isinstance(required, list) or _SAY_MORE & changed.keys():
        return changed
    is_listed = all(isinstance(name, str) and name in listed for name in required)  # what is no name, the library tells
    return changed | {"additionalProperties": False} if is_listed else changed


def _holds_beside(schema: Any) -> bool:
    """Whether two schemas may say of one object which properties it has."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, Mapping):
            beside = len(_BESIDE & part.keys())
            several = part.get("allOf")
            if beside > 1 or (beside and _OF_OBJECTS & part.keys()) or (isinstance(several, list) and len(several) > 1):
                return True
            waiting += parts_of(part)
    return False
