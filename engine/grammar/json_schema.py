"""What of a client's JSON Schema llguidance can be given, and how deep it is nested. It knows no grammar."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, TypeGuard
from urllib.parse import unquote

from hamburger.engine.grammar.json_patterns import OF_FORMATS, readable_pattern
from hamburger.engine.types.errors import cut

# llguidance follows references by recursion: some thousand levels would end the process, not raise an error.
MAX_LEVELS = 1000
MAX_DEPTH = 120  # of one schema: its reader of JSON takes 127 levels, some of which are the library's own
# What it takes some tenths of a second for. Properties cost it time by their square; multiples a state each.
MAX_PROPERTIES = 2000
MAX_MULTIPLE = 100_000
MAX_NAMES = 100  # that are made properties; a reference has many objects share them
_LESS = "ask for less at once"
VALUES = ("const", "enum", "default", "examples")  # what is in these is no schema
_BESIDE = frozenset(["allOf", "anyOf", "oneOf", "$ref"])  # schemas that hold beside the one that they stand in
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by names, which are no keywords
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_OF_NAMES = frozenset(["enum", "const", "type", "title", "description"])
# The library computes bounds as doubles that must fit 64 bits, and what is exact as a range of one.
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_FARTHEST = 9_223_372_036_854_000_000
_LEAST = 1e-20  # no shorter than a number of MAX_DIGITS (json_numbers.py)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MOST_COUNTED = 2**31  # no answer has as many of anything
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[3-7]|draft/20(?:19-09|20-12))/schema#?")


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with what `change` makes of the schemas in it, and of all else that is no value."""
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            changed[key] = {name: change(part) for name, part in value.items()}
        else:
            changed[key] = value if key in VALUES else change(value)
    return changed


def parts_of(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas in a schema, and all else in it that is no value."""
    found: list[Any] = []
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            found += value.values()
        elif key not in VALUES:
            found.append(value)
    return found


def usable_schema(schema: Any, root: Any = None) -> Any:
    """A schema without what asks for nothing and the library does not know, such as other formats (to JSON Schema they
    are notes, not rules), with an end to the digits of those that it knows, bounds and patterns that it reads rightly,
    and lists of names as properties. root: what it is in, if it is a part."""
    root = schema if root is None else root
    if isinstance(schema, list):
        return [usable_schema(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in with_parts(schema, partial(usable_schema, root=root)).items():
        if key in _COUNTS and isinstance(value, float) and value.is_integer():
            value = int(value)
        if key == "$schema" and isinstance(value, str):
            value = _known_draft(value)
        if _asks_for_nothing(key, value):
            continue
        if key == "pattern" and isinstance(value, str):
            value = readable_pattern(value)
        elif key == "patternProperties" and isinstance(value, Mapping):
            value = {readable_pattern(name): part for name, part in value.items()}
        kept[key] = value
    _set_bounds(kept)
    if isinstance(found := kept.get("format"), str) and found in OF_FORMATS:
        kept.setdefault("pattern", OF_FORMATS[found])
    return _with_names(kept, root) if "propertyNames" in kept else kept


def _known_draft(uri: str) -> str | None:
    """As the library knows it; None for what it would look for in the web: such a schema is of the newest draft."""
    found = _DRAFT.fullmatch(uri)
    if found is None:
        return None
    is_old = found[1].startswith("draft-0")
    return f"http{'' if is_old else 's'}://json-schema.org/{found[1]}/schema{'#' if is_old else ''}"


def _set_bounds(schema: dict[str, Any]) -> None:
    """Bounds that the library computes with, which allow nothing that these do not (but for those beyond 64 bits)."""
    for end in ("minimum", "maximum"):
        excluded = f"exclusive{end.capitalize()}"
        if isinstance(schema.get(excluded), bool) and schema.pop(excluded) and end in schema:
            schema[excluded] = schema.pop(end)  # as draft 4 and OpenAPI 3.0 say it
    for key in _BOUNDS:
        value, is_least = schema.get(key), "inimum" in key
        if not _is_number(value) or not -math.inf < value < math.inf:
            continue
        schema[key] = value = max(value, -_FARTHEST) if is_least else min(value, _FARTHEST)
        sign, exact = 1 if is_least else -1, value
        if abs(value) > _FARTHEST:  # which is a fault
            continue
        if isinstance(value, int) and int(rounded := float(value)) != value:
            # The next double within, which is itself allowed.
            exact = int(rounded if (rounded - value) * sign > 0 else math.nextafter(rounded, sign * math.inf))
        elif key.startswith("ex") and schema.get("type") != "integer" and value == int(value) and sign * value >= 0:
            # Beside another of the same whole part the library takes it for allowed.
            exact = math.nextafter(value, sign * math.inf) if value else sign * _LEAST
        if exact != value:
            del schema[key]
            inclusive = "minimum" if is_least else "maximum"
            other = schema.get(inclusive, exact)
            schema[inclusive] = (max if is_least else min)(exact, other) if _is_number(other) else exact


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """An object whose names are of a list, as of a dict over an Enum, has these properties and no others."""
    names, told = schema["propertyNames"], schema.get("properties", {})
    if isinstance(names, Mapping) and names.keys() == {"$ref"}:
        names = part_at(root, str(names["$ref"]))
    if not isinstance(names, Mapping) or names.keys() - _OF_NAMES or not isinstance(told, Mapping):
        return schema
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if not isinstance(listed, list) or len(listed) > MAX_NAMES or "patternProperties" in schema:
        return schema
    others = schema.get("additionalProperties", True)
    texts = [name for name in listed if isinstance(name, str)]
    properties = {name: told.get(name, others) for name in texts if name in told or others is not False}
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    return rest | {"properties": properties, "additionalProperties": False}


def _asks_for_nothing(key: str, value: Any) -> bool:
    match key:
        case "format":
            return isinstance(value, str) and value not in _FORMATS
        case "$schema":
            return value is None
        case "x-guidance":  # the library's own, which says how its text is read
            return True
        case "maxLength" | "maxItems" | "maxProperties":
            return isinstance(value, int) and value >= _MOST_COUNTED
        case "uniqueItems":
            return value is False
        case "propertyNames":  # of records, as zod writes them: all names are strings
            return value is True or value in ({}, {"type": "string"})
    return False


def fault_of(schema: Any) -> str | None:
    """What a schema has that the library reads wrongly, or too much of to be compiled soon; None for most. Without
    recursion, as `depth_of`."""
    num_properties, multiples, are_joined = 0, list[Decimal](), False
    waiting: list[tuple[Any, bool]] = [(schema, True)]  # and whether it says all of its value
    while waiting:
        part, is_whole = waiting.pop()
        if isinstance(part, list):
            waiting += [(item, is_whole) for item in part]
        if not isinstance(part, Mapping):
            continue
        for key, value in part.items():
            if key in _NAMED and isinstance(value, Mapping):
                waiting += [(item, True) for item in value.values()]
            elif key not in VALUES:
                waiting.append((value, key not in _BESIDE))
            elif key in ("const", "enum") and (rounded := _rounded(value)) is not None:
                return f"the number {cut(str(rounded))} as a value, which would be rounded: write it as a text"
            if key in ("properties", "patternProperties") and isinstance(value, Mapping):
                num_properties += len(value)
            elif key == "multipleOf" and isinstance(value, int | float) and value is not True and value > 0:
                multiples.append(Decimal(str(min(value, 10**15))))
            elif key == "multipleOf" and _is_number(value) and value <= 0:
                return f"a multipleOf of {value}: it must be above 0"
            elif key in _BOUNDS and _is_number(value) and abs(value) > _FARTHEST:
                return f"a {key} of {cut(str(value))}: numbers have at most 64 bits"
            are_joined |= key in ("allOf", "$ref")
        if is_whole and not part.keys() & _BESIDE and (number := _free_names(part)) is not None:
            return (
                f"a minProperties of {number} with names that are free, of which an answer could repeat one: list the "
                "names (properties, required), or ask for a list of pairs"
            )
    if num_properties > MAX_PROPERTIES:
        return f"{num_properties:,} properties together, but at most {MAX_PROPERTIES:,} are allowed: {_LESS}"
    # A number that must be a multiple of two is one of their least common multiple.
    of_one = [multiples] if are_joined else [[multiple] for multiple in multiples]
    if any(_num_steps(together) > MAX_MULTIPLE for together in of_one):
        places = f"a multipleOf of more than {MAX_MULTIPLE:,} of its last decimal place"
        return f"{places}, alone or with others of an allOf: {_LESS}"
    return None


def _free_names(schema: Mapping[str, Any]) -> int | None:
    """Its minProperties, if nothing makes an answer have as many different names: a name that the schema lists comes
    once, one that it leaves free may come again."""
    least, listed, kinds = schema.get("minProperties"), schema.get("required"), schema.get("type", "object")
    has_free = schema.get("additionalProperties") is not False or "patternProperties" in schema
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    if not isinstance(least, int) or not has_free or not is_object:
        return None
    return least if least > 1 + (len({*map(str, listed)}) if isinstance(listed, list) else 0) else None


def _rounded(value: Any) -> int | None:
    """A whole number in a value that no double holds, or that takes more than 64 bits."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, int) and (abs(part) >= 2**63 or int(float(part)) != part):
            return part
    return None


def _num_steps(multiples: Sequence[Decimal]) -> int:
    """The least common multiple, counted in the last decimal place of all; a larger number where it is too large."""
    places = max((-int(multiple.as_tuple().exponent) for multiple in multiples), default=0)
    found = 1
    for multiple in multiples:
        if multiple.adjusted() + places > 2 * len(str(MAX_MULTIPLE)):
            return MAX_MULTIPLE + 1
        found = math.lcm(found, int(multiple.scaleb(places)))
        if found > MAX_MULTIPLE:
            break
    return found


def levels_of(schema: Mapping[str, Any]) -> int:
    """No path through a schema and its references is longer: its depth, and that of each place that is referred to,
    which may be all of it where a name leads there (an anchor, another part's `$id`)."""
    own, parts = depth_of(schema), [part for part, _ in _all_in(schema) if isinstance(part, Mapping)]
    targets = [part[key] for part in parts for key in ("$ref", "$dynamicRef") if isinstance(part.get(key), str)]
    # From one of several documents in one, the same pointer leads elsewhere than from another.
    is_one = not any("$id" in part for part in parts if part is not schema)
    levels = own
    for target in {*targets} if is_one else targets:
        levels += depth_of(part_at(schema, target)) if is_one and target.startswith("#/") else own
        if levels > MAX_LEVELS:
            break
    return levels


def depth_of(part: Any) -> int:
    """How deep a part of a schema is nested."""
    return max(depth for _, depth in _all_in(part))


def _all_in(part: Any) -> Iterator[tuple[Any, int]]:
    """A part of a schema and all in it, each with its depth. Without recursion: a client chose how deep that is."""
    waiting = [(part, 1)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        waiting += [(item, depth + 1) for item in items]


def part_at(schema: Any, pointer: str) -> Any:
    """The part of a schema that a JSON pointer (#/...) leads to; None where it leads to nothing."""
    part = schema
    for name in unquote(pointer.lstrip("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and len(name) < 9:
            part = part[int(name)] if int(name) < len(part) else None
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    return part
