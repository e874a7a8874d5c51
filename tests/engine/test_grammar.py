"""Grammars: which texts they take, what is refused and why, and answers of a real core that always follow them."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from byte_grammars import BYTES, allowed, takes
from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.grammar.json_numbers import MAX_DIGITS, DigitTokens, NumberLimit
from hamburger.engine.grammar.json_schema import MAX_PROPERTIES, usable_schema
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.writing import choice_grammar, context_free_grammar, json_grammar, regex_grammar
from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (json_grammar(), ['{"a": [1, {"b": null}]}', "{}", '{\n    "a": 1\n}'], ["[]", "1", '{"a": 1', '{  "a": 1}']),
        (json_grammar({"type": "array", "items": {"enum": ["ä", 2]}}), ['["ä", 2]', "[]"], ['["b"]', "{}"]),
        (json_grammar(True), ["1", '"x"', "null"], ["x"]),
        (json_grammar({"format": "time", "type": "string"}), ['"12:30:00.123456789Z"'], ['"12:30:00.1234567891Z"']),
        (json_grammar({"format": "date-time", "type": "string"}), ['"2024-02-29T12:30:00+01:00"'],
         ['"2024-01-01T12:30:00.' + "0" * 10 + 'Z"']),
        (json_grammar({"format": "duration", "type": "string"}), ['"P1Y2M3DT4H5M6S"'], ['"P' + "1" * 10 + 'D"']),
        (json_grammar({"format": "time", "type": "string", "pattern": "[.]"}),
         ['"12:30:00.12345678910Z"'], ['"12:30:00Z"']),
        (choice_grammar(["yes", "no (maybe)", "a\nb", ""]), ["yes", "no (maybe)", "a\nb", ""], ["no", "yess", "n"]),
        (regex_grammar("[0-9]{3}-[a-z]+"), ["123-abc"], ["12-abc", "123-"]),
        (context_free_grammar('start: "a" NUM\nNUM: /[0-9]+/'), ["a1", "a123"], ["a", "b1"]),
    ],
)  # fmt: skip
def test_texts(grammar: str, good: list[str], bad: list[str]) -> None:
    assert [takes(grammar, text) for text in good] == [True] * len(good)
    assert [takes(grammar, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("schema", "text", "goes_on"),
    [
        ({"type": "number"}, "0." + "3" * MAX_DIGITS, False),
        ({"type": "number"}, "0." + "3" * (MAX_DIGITS - 1), True),
        ({"type": "number"}, "-" + "10" * (MAX_DIGITS // 2), False),
        ({"type": "integer"}, "1" * MAX_DIGITS, False),
        ({"type": "number"}, "1" * MAX_DIGITS + ".", True),  # a fraction counts for itself, and needs a digit
        ({"type": "number"}, "0.5e-" + "1" * MAX_DIGITS, False),
        ({"type": "string"}, '"\\"' + "1" * 60, True),
        ({"type": "array"}, '["a\\\\", ' + "1" * MAX_DIGITS, False),
        ({"type": "array"}, '["' + "1" * 30 + '", 1', True),
    ],
)
def test_digits_in_a_row_have_an_end(schema: dict[str, Any], text: str, goes_on: bool) -> None:
    matcher = BYTES.matcher(json_grammar(schema))
    for token_id in text.encode():
        assert allowed(matcher)[token_id]
        matcher.advance(token_id)
    assert allowed(matcher)[list(b"0123456789")].any() == goes_on
    matcher.go_back(1)
    assert allowed(matcher)[text.encode()[-1]]
    matcher.go_back(len(text) - 1)
    assert allowed(matcher)[text.encode()[0]]


def test_a_number_that_may_not_end_yet_goes_on() -> None:
    limit = NumberLimit(DigitTokens([b"1", b"2a", b",", b'"1'], 1))
    for _ in range(MAX_DIGITS):
        limit.advance(0)
    for before, after in ((0b0011, 0b0011), (0b1111, 0b1100), (0b0111, 0b0100), (0, 0)):
        mask = np.array([before], dtype=np.int32)
        limit.narrow(mask)
        assert mask.tolist() == [after]


def test_a_regular_expression_has_as_many_digits_as_it_says() -> None:
    assert takes(regex_grammar("[0-9]+"), "1" * 100)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (json_grammar({"type": "foo"}), "Invalid type: foo"),
        (json_grammar({"not": {}}), "not"),
        (json_grammar({"type": "integer", "minimum": 3, "maximum": 1}), r"minimum \(3\) is greater than maximum \(1\)"),
        (json_grammar(False), "Unsatisfiable"),
        (json_grammar({"$ref": "http://elsewhere/schema"}), "elsewhere"),
        (regex_grammar("(a"), "unclosed group"),
        (context_free_grammar("start: nothing"), "nothing"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(grammar: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        BYTES.compile(grammar)
    assert "\n" not in str(caught.value)


def test_a_model_without_an_end_token_takes_no_grammar() -> None:
    with pytest.raises(InvalidRequest, match="no end token"):
        Grammars(ByteTokenizer, VOCAB_SIZE, []).compile(json_grammar())


def test_a_matcher_goes_back_also_from_its_end() -> None:
    matcher = BYTES.matcher(choice_grammar(["ab"]))
    for token_id in b"ab":
        matcher.advance(token_id)
    assert matcher.is_complete
    matcher.advance(EOS)
    matcher.go_back(2)
    assert not matcher.is_complete
    assert allowed(matcher).nonzero()[0].tolist() == [ord("b")]
    matcher = BYTES.matcher(regex_grammar("a*"))
    matcher.advance(ord("a"))
    matcher.advance(EOS)  # though more could have come
    assert matcher.is_complete
    matcher.go_back(1)
    assert allowed(matcher).nonzero()[0].tolist() == [ord("a"), EOS]


def test_min_tokens_does_not_go_with_a_grammar() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens") as caught:
        SamplingParams(grammar=json_grammar(), min_tokens=1)
    assert caught.value.param == "min_tokens"


def test_formats_that_nobody_knows_are_notes() -> None:
    schema = {"properties": {"format": {"type": "string", "format": "binary"}}, "const": {"format": "x"}}
    BYTES.compile(json_grammar({"type": "object", "properties": schema["properties"]}))
    assert takes(json_grammar({"const": {"format": "x"}}), '{"format": "x"}')
    assert not takes(json_grammar({"type": "string", "format": "date"}), '"x"')


@pytest.mark.parametrize("name", ["default", "examples", "const", "enum"])
def test_a_property_may_be_called_as_a_keyword(name: str) -> None:
    """What is in it is a schema all the same, also where it is bounded."""
    schema = {"type": "object", "properties": {name: {"type": "string", "format": "password"}}}
    assert takes(json_grammar(schema), f'{{"{name}": "x"}}')
    many: dict[str, Any] = {"properties": {str(number): {} for number in range(MAX_PROPERTIES)}}
    with pytest.raises(InvalidRequest, match="properties"):
        json_grammar({"type": "object", "properties": {name: many}})


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "uniqueItems": False}, "[1, 1]"),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}}, '{"a": 1}'),
        ({"type": "object", "propertyNames": {}}, '{"a": 1}'),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9007199254740993"),
        ({"type": "number", "minimum": -1.7e308, "exclusiveMaximum": 1.7e308}, "-0.5"),
    ],
)
def test_keywords_that_ask_for_nothing_are_no_obstacle(schema: dict[str, Any], text: str) -> None:
    assert takes(json_grammar(schema), text)


@pytest.mark.parametrize("number", [175928847299117063, -(2**53) - 1, 2**63, -(2**63), 10**400])
def test_a_value_that_would_be_rounded_is_refused(number: int) -> None:
    for schema in ({"const": number}, {"properties": {"const": {"enum": ["a", {"ids": [number]}]}}}):
        with pytest.raises(InvalidRequest, match="rounded: write it as a text"):
            json_grammar(schema)
    near = 175928847299117056
    assert takes(json_grammar({"enum": [near, True]}), str(near))
    json_grammar({"default": 2**53 + 1})  # which asks for nothing


COLOURS = {"enum": ["red", "blue"], "title": "Colour", "type": "string"}


@pytest.mark.parametrize("names", [{"$ref": "#/$defs/Colour"}, {"type": "string", "enum": ["red", "blue"]}])
def test_an_object_s_names_may_be_of_a_list(names: dict[str, Any]) -> None:
    """As Pydantic has it of a dict over an Enum, zod of a record."""
    part = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}}
    grammar = json_grammar({"type": "object", "properties": {"a": part}, "$defs": {"Colour": COLOURS}})
    assert takes(grammar, '{"a": {"red": true}}')
    assert takes(grammar, '{"a": {}}')
    assert not takes(grammar, '{"a": {"green": true}}')
    assert not takes(grammar, '{"a": {"red": 1}}')
    told = {**part, "properties": {"red": {"const": 1}, "green": {}}, "additionalProperties": False}
    grammar = json_grammar({**told, "$defs": {"Colour": COLOURS}})
    assert takes(grammar, '{"red": 1}')
    assert not takes(grammar, '{"blue": 1}')


@pytest.mark.parametrize(
    "names", [{"pattern": "a"}, {"enum": [str(n) for n in range(101)]}, {"$ref": "#/no"}, 1, {"const": 1, "not": 1}]
)
def test_names_of_other_kinds_are_refused(names: Any) -> None:
    with pytest.raises(InvalidRequest, match="propertyNames"):
        BYTES.compile(json_grammar({"type": "object", "propertyNames": names}))


@pytest.mark.parametrize(
    ("pattern", "characters", "end", "good", "bad"),
    [
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "+-.01", "", "-.1", "-."),
        (
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            ".'a-@",
            "@a.bc",
            "a.'b",
            "a..b",
        ),
    ],
)
def test_known_patterns_with_look_around_allow_the_same_without(
    pattern: str, characters: str, end: str, good: str, bad: str
) -> None:
    """Pydantic's Decimal and zod's email."""
    schema = {"anyOf": [{"const": 1}, {"type": "string", "pattern": pattern}]}
    plain = usable_schema(schema)["anyOf"][1]["pattern"]
    for size in range(6):
        for text in map("".join, product(characters, repeat=size)):
            assert bool(re.search(plain, text + end)) == bool(re.search(pattern, text + end)), text
    grammar = json_grammar(schema)
    assert takes(grammar, f'"{good}{end}"')
    assert not takes(grammar, f'"{bad}{end}"')
