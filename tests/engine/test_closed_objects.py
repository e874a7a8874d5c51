"""Objects that list their properties have no others, where schemas do not hold beside each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from byte_grammars import BYTES, takes
from hamburger.engine.grammar.closed_objects import closed
from hamburger.engine.grammar.writing import json_grammar
from hamburger.engine.types.errors import InvalidRequest

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
CLOSED_A = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (A, {"a": 1}, {"a": 1, "b": 1}),
        ({"properties": {"a": INTEGER}}, [1], {"a": 1, "b": 1}),  # no type: whatever is no object is allowed
        ({"type": "object", "properties": {}}, {}, {"a": 1}),
        ({"type": "object", "properties": {"x": A}}, {"x": {"a": 1}}, {"x": {"a": 1, "b": 1}}),
        ({"type": "array", "items": A}, [{"a": 1}], [{"a": 1, "b": 1}]),
        ({"anyOf": [A, {"type": "null"}]}, None, {"a": 1, "b": 1}),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, {"a": 1}, {"a": 1, "b": 1}),
        ({"$defs": {"A": A}, "properties": {"x": {"$ref": "#/$defs/A"}}}, {"x": {"a": 1}}, {"x": {"a": 1, "b": 2}}),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}]}, {"a": 1}, {"a": 1, "b": 1}),  # as Pydantic 1 writes it
    ],
)
def test_what_is_not_listed_is_not_allowed(schema: Any, taken: Any, refused: Any) -> None:
    grammar = json_grammar(schema)
    assert takes(grammar, json.dumps(taken))
    assert not takes(grammar, json.dumps(refused))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        True,
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": INTEGER},
        {**A, "patternProperties": {"^b$": INTEGER}},
        {**A, "required": ["a", "b"]},
        {"allOf": [A, {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}]},
        {**A, "anyOf": [{"required": ["b"]}, {"properties": {"b": INTEGER}}]},
        {"$defs": {"B": {"type": "object", "properties": {"b": INTEGER}}}, "$ref": "#/$defs/B", **A},
        {"type": "object", "allOf": [{"$ref": "#/$defs/A"}], "properties": {"b": INTEGER}, "$defs": {"A": A}},
    ],
)
def test_what_says_more_or_holds_beside_stays_open(schema: Any) -> None:
    assert closed(schema) == schema
    grammar = json_grammar(schema)
    assert takes(grammar, '{"a": 1, "b": 1}') or takes(grammar, '{"b": 1, "a": 1}')  # in one order, as they are listed


def test_a_required_name_that_is_none_is_refused_as_ever() -> None:
    schema = {**A, "required": [{"a": 1}, ["b"]]}
    assert closed(schema) == schema
    with pytest.raises(InvalidRequest, match="cannot be"):
        BYTES.compile(json_grammar(schema))


def test_a_propertys_name_and_a_value_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"allOf": INTEGER, "properties": A, "x": {"const": {"properties": {"a": 1}}}},
    }
    assert closed(schema) == {
        "type": "object",
        "properties": {"allOf": INTEGER, "properties": CLOSED_A, "x": {"const": {"properties": {"a": 1}}}},
        "additionalProperties": False,
    }
