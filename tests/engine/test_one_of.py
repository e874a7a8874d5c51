"""oneOf in schemas: as anyOf, where its branches do not exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from byte_grammars import takes
from hamburger.engine.grammar.writing import grammar_with_schemas, json_grammar

NAMED_OR_NUMBERED: dict[str, Any] = {
    "oneOf": [
        {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    ]
}
IN_A_PROPERTY = {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (NAMED_OR_NUMBERED, ['{"id": 1}', '{"name": "x"}'], ['{"id": "x"}', "{}", "3"]),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["3", "3.5"], ['"3"']),
        (IN_A_PROPERTY, ['{"a": null}', '{"a": "x"}'], ['{"a": 1}']),
    ],
)
def test_texts_of_any_branch_fit(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for grammar in (json_grammar(schema), grammar_with_schemas("start: args0", [schema])):
        assert [takes(grammar, text) for text in good] == [True] * len(good)
        assert [takes(grammar, text) for text in bad] == [False] * len(bad)
