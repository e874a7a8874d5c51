"""What of schemas and grammars is refused before it is compiled, as that would take seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.writing import choice_grammar, context_free_grammar, json_grammar, regex_grammar
from hamburger.engine.types.errors import InvalidRequest

BYTES = Grammars(ByteTokenizer, VOCAB_SIZE, [EOS])


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda: json_grammar({"type": "integer", "multipleOf": 999_983}), "multipleOf of more than 100,000"),
        (lambda: json_grammar({"items": {"multipleOf": 10**5000}}), "multipleOf of more than 100,000"),
        (lambda: json_grammar({"multipleOf": 1.00001}), "multipleOf of more than 100,000 of its last decimal place"),
        (lambda: json_grammar({"allOf": [{"multipleOf": m} for m in (97, 89, 83)]}), "with others of an allOf"),
        (lambda: json_grammar({"allOf": [{"multipleOf": 5e-324}, {"multipleOf": 1}]}), "with others of an allOf"),
        (lambda: json_grammar({"$ref": "#/$defs/a", "multipleOf": 991, "$defs": {"a": {"multipleOf": 997}}}), "others"),
        (lambda: json_grammar({"properties": {str(i): {} for i in range(2001)}}), "2,001 properties together"),
        (lambda: json_grammar({"enum": ["a" * 500_000]}), "schema has 500,014 characters, but at most 500,000"),
        (lambda: regex_grammar("a" * 500_001), "regular expression has 500,001 characters"),
        (lambda: choice_grammar(["a" * 999] * 501), "choice has 501,000 characters"),
        (lambda: choice_grammar([""] * 500_001), "choice has 500,001 characters"),
        (lambda: json_grammar({"type": "integer", "multipleOf": -2}), "multipleOf of -2: it must be above 0"),
        (lambda: json_grammar({"type": "integer", "minimum": 10**19}), "minimum of 10000000000000000000: numbers have"),
        (lambda: json_grammar({"type": "number", "exclusiveMinimum": 1e999, "maximum": 5}), "exclusiveMinimum of inf"),
        (lambda: json_grammar({"type": "number", "exclusiveMinimum": 10**400}), "exclusiveMinimum of 1000"),
        (lambda: json_grammar({"minProperties": 3, "required": ["a", "a"]}), "minProperties of 3 with names"),
        (lambda: json_grammar({"minProperties": 3, "required": ["a"]}), "minProperties of 3 with names that are free"),
        (
            lambda: json_grammar({"patternProperties": {"^a$": {}}, "additionalProperties": False, "minProperties": 2}),
            "minProperties of 2 with names that are free",
        ),
        (lambda: context_free_grammar("root ::= " + "(" * 5000 + ")" * 5000), "is no GBNF"),
        (lambda: context_free_grammar("start: " + "a" * 500_000), "grammar has 500,007 characters"),
    ],
)
def test_what_would_take_seconds_to_compile_is_refused_before(write: Callable[[], str], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        write()


def test_ordinary_multiples_and_many_properties_are_taken() -> None:
    for multiple in (1, 0.01, 1e-5, 86_400, 100_000, 2.5):
        BYTES.compile(json_grammar({"type": "number", "multipleOf": multiple}))
    apart = {name: {"type": "integer", "multipleOf": m} for name, m in (("a", 97), ("b", 89), ("c", 83))}
    BYTES.compile(json_grammar({"type": "object", "properties": apart}))
    BYTES.compile(json_grammar({"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}))
    json_grammar({"enum": [{"multipleOf": 10**9}], "multipleOf": True})  # a value is no rule, and true no number
    BYTES.compile(json_grammar({"type": "object", "properties": {str(i): {"type": "integer"} for i in range(2000)}}))
