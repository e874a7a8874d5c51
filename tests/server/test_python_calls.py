"""Calls that are written as Python: what they say, at every split point, and that nothing of them is run."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hamburger.server.tools import python_values
from hamburger.server.tools.python_values import PythonArguments
from hamburger.server.tools.tool_fields import Function, Tool
from hamburger.server.tools.tool_parsers import Family, parser_of
from hamburger.server.tools.tool_use import ToolUse
from hamburger.server.tools.value_ends import ValueEnds
from streamed_calls import deltas

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "add-up": {}}
Calls = list[tuple[str, str]]
CASES: list[tuple[Family, str, str, Calls]] = [
    ("olmo3", '<function_calls>get_weather(city="Rom")</function_calls>', "", [("get_weather", '{"city": "Rom"}')]),
    (
        "olmo3",
        'I look.\n<function_calls>\nget_weather(city="Rom", days=2)\nadd-up(a=null, b=true)\n</function_calls>',
        "I look.",
        [("get_weather", '{"city": "Rom", "days": 2}'), ("add-up", '{"a": null, "b": true}')],
    ),
    (
        "olmo3",
        "<function_calls>now()</function_calls> and <function_calls>[now(), x(y=1)]</function_calls>.",
        "and.",
        [("now", "{}"), ("now", "{}"), ("x", '{"y": 1}')],
    ),
    (
        "olmo3",
        '<function_calls>{"name": "now", "arguments": {"a": 1}}</function_calls>',
        "",
        [("now", '{"a": 1}')],
    ),
    ("olmo3", "A <function_calls> tag, and now() too", "A <function_calls> tag, and now() too", []),
    ("olmo3", "<function_calls>x = 1</function_calls>", "<function_calls>x = 1</function_calls>", []),
    ("olmo3", '<function_calls>get_weather(city="Ro', "", [("get_weather", '{"city": "Ro')]),
    ("olmo3", "get_weather(city=1)", "get_weather(city=1)", []),
    (
        "olmo3",  # breaks off where it is no literal
        "<function_calls>add-up(a=1, b=open('x'))</function_calls>",
        "('x'))</function_calls>",
        [("add-up", '{"a": 1, "b": "open"')],
    ),
    (
        "pythonic",
        '[get_weather(city="Paris"), add-up(a=1,b = -2.5e3,)]',
        "",
        [("get_weather", '{"city": "Paris"}'), ("add-up", '{"a": 1, "b": -2.5e3}')],
    ),
    ("pythonic", ' [get_weather("Paris", 3)]\n', "", [("get_weather", '{"city": "Paris", "days": 3}')]),
    ("pythonic", "get_weather(city=Paris)", "get_weather(city=Paris)", []),
    ("pythonic", "[get_weather(city=Paris)]", "", [("get_weather", '{"city": "Paris"}')]),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[get_weather]", "[get_weather]", []),
    ("pythonic", "[]", "[]", []),
    ("pythonic", '[{"name": "add-up", "arguments": {"a":1}}]', "", [("add-up", '{"a":1}')]),
    ("pythonic", "Hello [get_weather(city=1)]", "Hello [get_weather(city=1)]", []),
    ("json", "[get_weather(city=1)]", "[get_weather(city=1)]", []),
]


def use_of(family: Family) -> ToolUse:
    functions = [Function(name=name, parameters=schema or None) for name, schema in SCHEMAS.items()]
    return ToolUse([Tool(type="function", function=function) for function in functions], "auto", family)


def check_stream(family: Family, pieces: Sequence[str]) -> None:
    content, calls = deltas(use_of(family), pieces)
    whole, whole_calls = use_of(family).stream().message("".join(pieces))
    assert content == (whole or "")
    assert calls == [(call["function"]["name"], call["function"]["arguments"]) for call in whole_calls]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_a_whole_text(family: Family, text: str, content: str, calls: Calls) -> None:
    parsed = parser_of(family, SCHEMAS)(text, True, ValueEnds())
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert parsed.content.strip() == content.strip()


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_every_split_point_streams_what_the_whole_says(family: Family, text: str, content: str, calls: Calls) -> None:
    for cut in range(len(text) + 1):
        check_stream(family, [text[:cut], text[cut:]])
    check_stream(family, [*text, ""])


def read(text: str) -> Any:
    """The JSON of the arguments that `text` and a closing bracket are."""
    arguments = PythonArguments(0, [])
    arguments.read(f"{text})")
    assert (arguments.end, arguments.is_broken) == (len(text) + 1, False)
    return json.loads(arguments.json)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'it\'s'", "it's"), (r'"a\tb\\n\q"', "a\tb\\n\\q"), (r"r'\d\n'", r"\d\n"), ('"""a"b\n""c"""', 'a"b\n""c'),
        ("''", ""), ("''''''", ""), (r"'\x41\101\u00e9\U0001F600'", "AAé😀"), (r"'\ud83d\ude00'", "😀"),
        (r"'\ud83d!'", "\ufffd!"), (r"'\UFFFFFFFF'", "\ufffd"), ("'a\nb'", "a\nb"), ("f'{x}'", "{x}"),
        ("(1, 'a', [None, True],)", [1, "a", [None, True]]), ("{'a': {'b': None}, 1: ()}", {"a": {"b": None}, "1": []}),
        ("-0.5", -0.5), ("007", "007"), ("1_000", "1_000"), ("2024-01-02", "2024-01-02"), ("nan", "nan"), ("1e5", 1e5),
    ],
)  # fmt: skip
def test_values(written: str, value: Any) -> None:
    assert read(f"x={written}") == {"x": value}
    assert read(f" x = {written} , ") == {"x": value}


@pytest.mark.parametrize(
    "text", ["x=1 2)", "x=)", "1)", "x=1, x=2)", "x={1, 2})", "x={1: })", "x=a.b())", "x=[1)", ",)"]
)
def test_what_is_no_call_of_literals_breaks_it(text: str) -> None:
    arguments = PythonArguments(0, [])
    arguments.read(text)
    assert (arguments.end, arguments.is_broken) == (None, True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=100)
@given(
    st.dictionaries(st.from_regex("[a-z_]{1,5}", fullmatch=True), VALUES, max_size=4), st.randoms(use_true_random=False)
)
def test_python_and_json_values_come_back(values: dict[str, Any], draw: random.Random) -> None:
    for write in (repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)):
        call = f"add-up({', '.join(f'{key}={write(value)}' for key, value in values.items())})"
        for family, text in (("olmo3", f"<function_calls>{call}</function_calls>"), ("pythonic", f"[{call}]")):
            parsed = parser_of(family, SCHEMAS)(text, True, ValueEnds())  # type: ignore[arg-type]
            assert [json.loads(found.arguments) for found in parsed.calls] == [values]
            cuts = sorted(draw.randint(0, len(text)) for _ in range(9))
            check_stream(family, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])  # type: ignore[arg-type]


PIECES = (
    *(
        "<function_calls>",
        "</function_calls>",
        "</func",
        "get_weather",
        "add-up",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        "=",
    ),
    *(
        "city",
        "'",
        '"',
        '"""',
        "\\",
        "\\u",
        "\\ud83d",
        "\\ude00",
        "d8",
        "1",
        "-",
        "None",
        "r",
        "\n",
        " ",
        ":",
        "x=",
        "é",
    ),
)


@settings(max_examples=300)
@given(st.sampled_from(["olmo3", "pythonic"]), st.lists(st.sampled_from(PIECES), max_size=16))
def test_streamed_and_whole_agree_on_anything(family: Family, parts: list[str]) -> None:
    for before in ("", "<function_calls>get_weather(" if family == "olmo3" else "[get_weather("):
        pieces = [before, *parts, ""]
        check_stream(family, pieces)
        check_stream(family, [*"".join(pieces), ""])


def test_no_depth_is_too_deep() -> None:
    arguments = PythonArguments(0, [])
    arguments.read(f"x={'[' * 100_000}")
    assert not arguments.is_broken
    assert len(arguments.json) > 100_000


def test_each_character_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a value gets, and by however small pieces."""
    matched = 0

    class Counting:
        def match(self, text: str, at: int) -> Any:
            nonlocal matched
            found = plain.match(text, at)
            matched += 0 if found is None else len(found[0])
            return found

    plain = python_values._PLAIN['"']
    monkeypatch.setitem(python_values._PLAIN, '"', Counting())
    stream = use_of("olmo3").stream()
    stream.add('<function_calls>get_weather(city=["words', is_final=False)
    for _ in range(1000):
        assert stream.add("words", is_final=False)["tool_calls"][0]["function"]["arguments"] == "words"
    assert matched <= 5005
