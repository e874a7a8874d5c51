"""Random JSON Schemas, for tests and measurements of structured output."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "age", "city", "größe", "名前", "tags", "is_open", "price", "emoji_😀", "kind", "note", "id"]
WORDS = ["red", "green", "blue", "für", "日本", "yes", "no", 'a "quoted" word', "back\\slash", "😀"]


def random_schema(draw: random.Random) -> dict[str, Any]:
    """An object schema with nested objects, enums, bounded arrays and numbers, unicode, and sometimes $ref."""
    definitions: dict[str, Any] = {}
    schema = _object(draw, 2, definitions)
    return {**schema, "$defs": definitions} if definitions else schema


def _object(draw: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(1, 4))
    properties = {name: _value(draw, depth, definitions) for name in names}
    required = [name for name in names if draw.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(draw: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    kinds = ["string", "enum", "integer", "number", "boolean", "null", "const", "pattern", "format", "any of"]
    match draw.choice(kinds + ["object", "array", "ref"] * depth):
        case "string":
            return {"type": "string", "maxLength": draw.choice([5, 20, 40])}
        case "enum":
            return {
                "enum": draw.sample(WORDS, draw.randint(1, 4)) + draw.sample([1, 2.5, None, True], draw.randint(0, 2))
            }
        case "integer":
            low = draw.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}
        case "number":
            low = draw.randint(-50, 50)
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.randint(1, 100)}
        case "const":
            return {"const": draw.choice([*WORDS, 7, False])}
        case "pattern":
            return {
                "type": "string",
                "pattern": draw.choice(["^[A-Z]{2}-[0-9]{1,4}$", "^(cat|dog)s?$", "^[äöü]{1,3}$"]),
            }
        case "format":
            return {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4"])}
        case "any of":
            return {
                "anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["x", "y"]}]
            }
        case "object":
            return _object(draw, depth - 1, definitions)
        case "array":
            low = draw.randint(0, 2)
            items = _value(draw, depth - 1, definitions)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(0, 2)}
        case "ref":
            name = f"thing{len(definitions)}"
            definitions[name] = {}
            definitions[name] = _value(draw, depth - 1, definitions)
            return {"$ref": f"#/$defs/{name}"}
        case kind:
            return {"type": kind}
