"""What schemas and grammars mean where the library reads them otherwise, or not at all."""

from __future__ import annotations

import json
from calendar import isleap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_grammars import BYTES, takes
from hamburger.engine.grammar.writing import context_free_grammar, grammar_with_schemas, json_grammar
from hamburger.engine.types.errors import InvalidRequest


def taken(schema: Any, *texts: str) -> list[str]:
    grammar = json_grammar(schema)
    return [text for text in texts if takes(grammar, text)]


NUMBERS = ("-2", "-1.5", "-1", "-1.0", "-0.5", "-0.25", "-0", "0", "0.0", "0.25", "0.5", "1", "1.0", "1.25", "1.5", "2")


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.25", "0.5"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.25", "1.5"]),
        ({"exclusiveMinimum": 1.0, "maximum": 1.5}, ["1.25", "1.5"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.25"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["0.25", "0.5", "1", "1.0"]),
        ({"exclusiveMinimum": 0, "maximum": 1, "type": "integer"}, ["1"]),
        ({"exclusiveMinimum": 0, "minimum": 0.3, "maximum": 0.5}, ["0.5"]),
        ({"exclusiveMaximum": 0, "maximum": -0.3, "minimum": -0.5}, ["-0.5"]),
        ({"exclusiveMinimum": 0, "maximum": 5, "exclusiveMaximum": 0.5}, ["0.25"]),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, ["0.25", "0.5"]),
        ({"$defs": {"p": {"exclusiveMinimum": 0}}, "$ref": "#/$defs/p", "maximum": 0.5}, ["0.25", "0.5"]),
        ({"exclusiveMinimum": 0, "multipleOf": 0.5, "maximum": 1.5}, ["0.5", "1", "1.0", "1.5"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5, "exclusiveMaximum": True}, ["0.25"]),
        ({"minimum": 1.25, "exclusiveMinimum": False, "maximum": 1.5}, ["1.25", "1.5"]),
        ({"minimum": 2, "exclusiveMaximum": True}, ["2"]),
    ],
)
def test_an_excluded_bound_is_excluded(bounds: dict[str, Any], expected: list[str]) -> None:
    assert taken({"type": "number", **bounds}, *NUMBERS) == expected


@given(st.integers(-3, 3), st.integers(1, 99), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_a_range_takes_lies_within_it(whole: int, hundredths: int, from_above: bool, excludes: bool) -> None:
    near, far = (whole, whole - hundredths / 100) if from_above else (whole, whole + hundredths / 100)
    sides = ("aximum", "inimum") if from_above else ("inimum", "aximum")
    other = f"exclusiveM{sides[1]}" if excludes else f"m{sides[1]}"
    bounds = {f"exclusiveM{sides[0]}": near, other: far}
    for text in taken({"type": "number", **bounds}, *(f"{n / 4:g}" for n in range(-20, 21)), str(near), f"{near}.0"):
        assert float(text) < near if from_above else float(text) > near, (bounds, text)
        assert (float(text) - far) * (1 if from_above else -1) >= (1e-12 if excludes else 0), (bounds, text)


def test_whole_bounds_that_no_double_holds_are_rounded_inwards() -> None:
    around = [str(2**53 + i) for i in range(5)]
    assert taken({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, *around) == [str(2**53 + 2)]
    assert taken({"type": "integer", "exclusiveMinimum": 2**53 + 1}, *around) == around[2:]
    assert taken({"type": "integer", "maximum": -(2**53) - 1}, str(-(2**53)), str(-(2**53) - 2)) == [str(-(2**53) - 2)]
    assert taken({"type": "integer", "minimum": 2**54, "exclusiveMinimum": 2**53 + 1}, *around, str(2**54)) == [
        str(2**54)
    ]
    assert taken({"type": "integer", "maximum": 5, "exclusiveMaximum": 2**53 + 1}, "5", "100") == ["5"]
    assert taken({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "0", "-9000000000000000000") != []


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('^[^"]*$', ["a\\b", "a-b", "\n"], ['a"b']),
        (r"^[^\\]*$", ['a"b', "^"], ["a\\b"]),
        (r'^[^<>:"/\\|?*]+$', ["name-1.txt"], ['a"', "a\\", "a/b"]),
        ("^[^-a]*$", ["b", '"'], ["-", "a"]),
        ("^[^]a]*$", ["b[", '"'], ["]", "a"]),
        (r"^\[[^a]\]$", ["[b]", '["]'], ["[a]"]),
        (r"^[a\[^b]+$", ["a[^b"], ["c"]),
        (r"^[^[\]{}]+$", ["ab"], ["[", "]", "{"]),
        (r"^[a[]b$", ["ab", "[b"], ["b"]),
        (r"^[!@&&#~~$]+$", ["!&#", "~$"], ["a"]),
        (r"^[+--]+$", ["+,-"], [".", "a"]),
        (r"^[--/]+$", ["-./"], ["+", "a"]),
        (r"^[^-[a]+$", ["b"], ["-", "[", "a"]),
        (r"^[[:alpha:]]$", ["a"], [":", "1"]),
        (r"^[a\]]\]$", ["]]", "a]"], ["b]"]),
        (r"^[^]x$", ["ax", "]x"], ["x"]),
    ],
)
def test_a_pattern_lists_and_leaves_out_what_it_says(pattern: str, good: list[str], bad: list[str]) -> None:
    texts = [json.dumps(text) for text in good + bad]
    assert taken({"type": "string", "pattern": pattern}, *texts) == texts[: len(good)]
    names = [json.dumps({text: 1}) for text in good + bad]
    of_names = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    assert taken(of_names, *names) == names[: len(good)]


@pytest.mark.parametrize("year", [4, 400, 1900, 1996, 2000, 2023, 2024, 2100])
def test_february_is_as_long_as_in_its_year(year: int) -> None:
    days = [f"{year:04}-{day}" for day in ("01-31", "02-28", "02-29", "02-30", "04-31", "10-10")]
    known = [day for day in days if day[5:] in ("01-31", "02-28", "10-10") or (day[5:] == "02-29" and isleap(year))]
    assert taken({"type": "string", "format": "date"}, *(f'"{day}"' for day in days)) == [f'"{day}"' for day in known]
    times = [f'"{day}T23:59:59.{"1" * 9}Z"' for day in days]
    assert taken({"type": "string", "format": "date-time"}, *times) == [time for time in times if time[1:11] in known]


def nested(number: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(number):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize("number", [60, 400])
def test_a_schema_of_too_many_levels_is_told_so(number: int) -> None:
    for write in (json_grammar, lambda schema: grammar_with_schemas("start: args0", [schema])):
        with pytest.raises(InvalidRequest, match=f"{2 * number + 2} levels deep, but at most 120"):
            write(nested(number))


def test_as_many_levels_as_are_allowed_can_be_read() -> None:
    text = '{"a": ' * 59 + "1" + "}" * 59
    assert taken(nested(59), text) == [text]
    assert takes(grammar_with_schemas("start: args0", [nested(59)]), text)


def chained(pointer: str, number: int, levels: int) -> dict[str, Any]:
    """Schemas by names, of which each leads to the next one."""
    parts: dict[str, Any] = {f"d{number - 1}": {"type": "null"}}
    for i in range(number - 1):
        part: dict[str, Any] = {"$ref": pointer.format(i + 1)}
        for _ in range(levels):
            part = {"type": "array", "items": part}
        parts[f"d{i}"] = part
    return parts


@pytest.mark.parametrize("pointer", ["#/$defs/d{}", "#/$defs/%64{}", "http://a.b/c#/$defs/d{}", "#d{}", "d{}"])
def test_the_levels_behind_each_form_of_reference_count(pointer: str) -> None:
    parts = chained(pointer, 20, 60)
    for name, part in parts.items():
        part |= {"$id": name} if pointer == "d{}" else {"$anchor": name}
    with pytest.raises(InvalidRequest, match="levels together, but at most 1000"):
        json_grammar({"$id": "http://a.b/c", "$ref": pointer.format(0), "$defs": parts})


def test_the_levels_of_each_document_in_a_schema_count() -> None:
    """One pointer leads to a place in each of them."""
    documents = chained("d{}", 12, 0)
    for name, document in documents.items():
        document |= {"$id": name, "items": {"$ref": "#/$defs/d0"}, "$defs": chained("#/$defs/d{}", 12, 3)}
    with pytest.raises(InvalidRequest, match="levels together, but at most 1000"):
        json_grammar({"$ref": "d0", "$defs": documents})


def test_a_reference_may_be_written_as_addresses_are() -> None:
    names = {"type": "string", "enum": ["a", "b"]}
    schema = {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Gr%C3%B6%C3%9Fe%3Ca%3E"},
        "$defs": {"Größe<a>": names},
    }
    assert taken(schema, '{"a": 1}', '{"c": 1}') == ['{"a": 1}']


def test_free_names_may_be_asked_for_where_none_can_come_twice() -> None:
    free = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert taken({**free, "minProperties": 1}, "{}", '{"a": 1}') == ['{"a": 1}']
    assert taken({**free, "required": ["a"], "minProperties": 2}, '{"a": 1}', '{"a": 1, "b": 2}') == [
        '{"a": 1, "b": 2}'
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"minProperties": 2}, {"properties": {"a": {}}, "required": ["a"], "additionalProperties": False}]},
        {"type": "object", "allOf": [{"required": ["a", "b"]}, {"minProperties": 2}]},
        {"type": "string", "minProperties": 4},
    ],
)
def test_names_that_another_schema_lists_are_not_called_free(schema: dict[str, Any]) -> None:
    json_grammar(schema)


@pytest.mark.parametrize("kind", [5, None, {"a": 1}, True])
def test_a_type_that_is_none_is_told_whatever_stands_beside(kind: Any) -> None:
    with pytest.raises(InvalidRequest):
        BYTES.compile(json_grammar({"type": kind, "minProperties": 3, "minimum": -(10**400), "maximum": 10**400}))


@pytest.mark.parametrize(
    "uri",
    [
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft/2020-12/schema",
        "http://json-schema.org/schema#",
        "https://example.com/own",
    ],
)
def test_a_schemas_draft_is_known_by_any_of_its_names(uri: str) -> None:
    assert taken({"$schema": uri, "type": "boolean"}, "true", "1") == ["true"]


def test_what_an_older_draft_means_stays() -> None:
    old = {"$schema": "https://json-schema.org/draft-04/schema", "minimum": 3, "exclusiveMinimum": True}
    assert taken({**old, "type": "integer"}, "3", "4") == ["4"]


def test_counts_may_be_large_or_written_as_floats() -> None:
    assert taken({"type": "string", "maxLength": 2**53 - 1}, '"a"') == ['"a"']
    assert taken({"type": "string", "maxLength": 2.0}, '"ab"', '"abc"') == ['"ab"']


def test_a_client_says_nothing_of_how_json_is_written() -> None:
    odd = {"whitespace_flexible": False, "item_separator": "ZZ", "lenient": True}
    two = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}, "required": ["a", "b"]}
    assert taken({**two, "x-guidance": odd}, '{"a": 1ZZ"b": 1}', '{"a": 1, "b": 1}') == ['{"a": 1, "b": 1}']
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        BYTES.compile(json_grammar({"type": "array", "uniqueItems": True, "x-guidance": odd}))


def test_compact_json_is_one_line_as_json_dumps_writes_it() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "object"}},
        "required": ["a"],
    }
    values = [{"a": []}, {"a": [1, 2]}, {"a": [3], "b": {"c": [{"d": None}, "x, y: z"]}}]
    for grammar in (json_grammar(schema, compact=True), grammar_with_schemas("start: args0", [schema], compact=True)):
        assert all(takes(grammar, json.dumps(value)) for value in values)
        for other in (json.dumps(values[1], indent=2), '{"a":[1,2]}', '{ "a": [1, 2] }', '{"a": [1,  2]}'):
            assert not takes(grammar, other)
            assert takes(json_grammar(schema), other) is ("  " not in other or "\n" in other)


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" | "::="',
        '?start: "a" | "::="',
        '!start: "a" | "::="',
        'start: A | B\nA: "a"\nB: /::=/',
        '// a comment: root ::= "b"\nstart: "a" | "::="',
        'root ::= "a" | "::="',
        '# start: "b"\nroot ::= "a" | [:] ":" [^"a]',
        'root ::= start\nstart ::= "a" | more-start\nmore-start ::= "::="',
        'start ::= "a" | "::="\nroot ::= start # start',
    ],
)
def test_lark_and_gbnf_are_told_apart_by_their_rules(text: str) -> None:
    grammar = context_free_grammar(text)
    assert [takes(grammar, answer) for answer in ("a", "::=", "b")] == [True, True, False]


def test_gbnf_names_characters_by_their_numbers() -> None:
    grammar = context_free_grammar(r'root ::= "\u0041\u00e9" [\u00e9-\u00ff\U0001F600] "\\u00e9" "\x42"')
    assert [takes(grammar, f"Aé{middle}\\u00e9B") for middle in "éÿ😀a"] == [True, True, True, False]
