"""Calls that are written as tags, as Qwen3-Coder does: each kind of value, at every split point, cut, and broken."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hamburger.server.tools.tool_fields import AllowedFunctions, AllowedTools, Function, Tool
from hamburger.server.tools.tool_use import ToolUse
from streamed_calls import deltas

PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "lines": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "mode": {"enum": ["a", "b"]},
    "level": {"enum": [1, "high"]},
    "any": {},
    "same": {"$ref": "#/$defs/x"},
    "grade": {"$ref": "#/$defs/Grade"},
    "page": {"anyOf": [{"$ref": "#/$defs/Page"}, {"type": "null"}]},
    "loop": {"$ref": "#/properties/loop"},
    "either": {"type": ["string", "null"]},
    "ratio": {"type": "float"},
    "names": {"type": ["list", "null"]},
    "name": {"type": "str"},
    "when": {"type": "date"},
}
DEFS = {"Grade": {"type": "string", "enum": ["1", "2"]}, "Page": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": DEFS}
TOOLS = [
    Tool(type="function", function=Function(name="edit", parameters=PARAMETERS)),
    Tool(type="function", function=Function(name="now")),
]


def use() -> ToolUse:
    return ToolUse(TOOLS, "auto", "hermes")


def tagged(**values: str) -> str:
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())


def called(parameters: str, name: str = "edit") -> str:
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def calls_of(text: str) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in use().stream().message(text)[1]]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("path", "src/main.py", "src/main.py"),
        ("path", "12", "12"),
        ("path", "true", "true"),
        ("path", "", ""),
        ("path", "\n two\n\nlines \\ and \"quotes\"\n", "\n two\n\nlines \\ and \"quotes\"\n"),
        ("path", "if a < b: <b>é 🍔</b> </param> <parameter", "if a < b: <b>é 🍔</b> </param> <parameter"),
        ("unknown", "5", "5"),
        ("grade", "1", "1"),
        ("page", "1", 1),
        ("page", "null", None),
        ("page", "1.5", "1.5"),
        ("loop", "1", 1),
        ("count", "5", 5),
        ("count", "five", "five"),
        ("count", "5.5", "5.5"),
        ("count", "123456789012345678901234567890", 123456789012345678901234567890),
        ("share", "5", 5),
        ("share", "0.25", 0.25),
        ("share", "NaN", "NaN"),
        ("deep", "true", True),
        ("deep", "False", False),
        ("deep", "yes", "yes"),
        ("lines", '["a",\n "b"]', ["a", "b"]),
        ("lines", "[1, NaN]", "[1, NaN]"),
        ("options", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("options", "[1]", "[1]"),
        ("options", "[" * 100_000, "[" * 100_000),
        ("maybe", "3", 3),
        ("maybe", "None", None),
        ("mode", "a", "a"),
        ("mode", '"a"', '"a"'),
        ("level", "1", 1),
        ("level", "high", "high"),
        ("any", "1", 1),
        ("any", "words", "words"),
        ("same", "[1]", [1]),
        ("either", "null", None),
        ("either", "5", "5"),
        ("ratio", "0.5", 0.5),
        ("names", '["a"]', ["a"]),
        ("name", "5", "5"),
        ("when", "2026-11-30", "2026-11-30"),
    ],
)  # fmt: skip
def test_a_value_is_what_the_schema_says_of_it(key: str, written: str, value: Any) -> None:
    [(name, arguments)] = calls_of(called(tagged(**{key: written})))
    assert name == "edit"
    assert json.loads(arguments) == {key: value}
    assert type(json.loads(arguments)[key]) is type(value)


def test_functions_that_were_not_asked_and_their_values_are_told_as_text() -> None:
    assert calls_of(called(tagged(n="5"), "other")) == [("other", '{"n": "5"}')]


TEXTS = {
    "two": "I look.\n\n" + called(tagged(path="a\nb", count="3")) + "\n" + called("", "now"),
    "two in one": called(tagged(path="x") + "</function>\n<function=now>\n"),
    "compact": "<tool_call><function=edit><parameter=path>x</parameter><parameter=lines>[1]</parameter></function>"
    "</tool_call> done",
    "no end": "<tool_call>\n<function=edit>\n" + tagged(path="x", deep="true") + "</tool_call>",
    "words between": "<tool_call>\n<function=edit>\n" + tagged(path="x") + "and so on</function>\n</tool_call>",
    "twice": called(tagged(path="x") + tagged(path="y", count="1")),
    "no begin": "I look.\n\n<function=edit>\n" + tagged(path="x") + "</function>\n</tool_call>",
    "no begin, several": "<function=now>\n</function>\n<function=edit>\n"
    + tagged(path="x")
    + "</function>\n</tool_call>"
    "\n<function=now></function> done " + called("", "now"),
    "functions in words": "Say <function=edit> or <function=edit>\n<b> or <function=other>\n</function> or <function=",
    "values without an end": "<tool_call>\n<function=edit>\n<parameter=path>\na\nb\n<parameter=count>\n3\n"
    "<parameter=lines>\n[1]\n</function>\n</tool_call>",
    "a text without an end": "<tool_call>\n<function=edit>\n<parameter=path>\nab\n</function>\n</tool_call>\n",
    "values that hold tags": called(tagged(path="<parameter=count>\n<parameter=path>\n</function>\n<parameter=n>")),
    "a value that looks like its end": called(tagged(path="</paramet\n</parameter \n<")),
    "cut in a text": "<tool_call>\n<function=edit>\n<parameter=path>\nhalf a te",
    "cut in a number": "<tool_call>\n<function=edit>\n" + tagged(path="x") + "<parameter=count>\n1",
    "cut in a key": "<tool_call>\n<function=edit>\n<parameter=pa",
    "cut in a name": "a <tool_call>\n<function=ed",
    "no name": "<tool_call>\n<function=>\n</function>\n</tool_call>",
    "no call": "<tool_call>\n<function\nwords",
    "broken key": "<tool_call>\n<function=edit>\n<parameter=pa\nth>x</parameter></function></tool_call>",
    "JSON, too": called(tagged(path="x")) + '\n<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>',
}
CALLS = {
    "two": [("edit", '{"path": "a\\nb", "count": 3}'), ("now", "{}")],
    "two in one": [("edit", '{"path": "x"}'), ("now", "{}")],
    "compact": [("edit", '{"path": "x", "lines": [1]}')],
    "no end": [("edit", '{"path": "x", "deep": true}')],
    "words between": [("edit", '{"path": "x"}')],
    "twice": [("edit", '{"path": "x", "count": 1}')],
    "no begin": [("edit", '{"path": "x"}')],
    "no begin, several": [("now", "{}"), ("edit", '{"path": "x"}'), ("now", "{}"), ("now", "{}")],
    "functions in words": [],
    "values without an end": [("edit", '{"path": "a\\nb", "count": 3, "lines": [1]}')],
    "a text without an end": [("edit", '{"path": "ab"}')],
    "values that hold tags": [
        ("edit", '{"path": "<parameter=count>\\n<parameter=path>\\n</function>\\n<parameter=n>"}')
    ],
    "a value that looks like its end": [("edit", '{"path": "</paramet\\n</parameter \\n<"}')],
    "cut in a text": [("edit", '{"path": "half a te')],
    "cut in a number": [("edit", '{"path": "x"')],
    "cut in a key": [("edit", "{")],
    "cut in a name": [],
    "no name": [],
    "no call": [],
    "broken key": [("edit", "{}")],
    "JSON, too": [("edit", '{"path": "x"}'), ("now", '{"a": 1}')],
}
CONTENTS = {
    "two": "I look.",
    "no begin": "I look.",
    "no begin, several": " done",
    "compact": " done",
    "words between": "and so on</function>\n</tool_call>",
    "broken key": "<parameter=pa\nth>x</parameter></function></tool_call>",
    **{name: TEXTS[name] for name in ("cut in a name", "no name", "no call", "functions in words")},
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_streamed_is_what_a_whole_answer_says(name: str) -> None:
    text, rng = TEXTS[name], random.Random(name)
    content, made = use().stream().message(text)
    assert (content or "") == CONTENTS.get(name, "")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in made] == CALLS[name]
    splits = [[text[:i], text[i:]] for i in range(len(text))] + [[*text]]
    for _ in range(50):
        at = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 9)))
        splits.append([text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)])
    for pieces in splits:
        assert deltas(use(), pieces) == (content or "", CALLS[name])


@pytest.mark.parametrize(
    "choice", ["auto", {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}]
)
def test_where_a_grammar_holds_calls_one_without_its_beginning_is_text(choice: Any) -> None:
    """It would get past the schema of a strict function."""
    text = "<function=now>\n</function>\n</tool_call>"
    if choice == "auto":
        strict = Tool(type="function", function=Function(name="now", strict=True))
        held = ToolUse([TOOLS[0], strict], "auto", "hermes")
    else:
        allowed = AllowedTools(type="allowed_tools", allowed_tools=AllowedFunctions(**choice))
        held = ToolUse(TOOLS, allowed, "hermes")
    assert held.stream().message(text) == (text, [])
    assert use().stream().message(text)[1]


@settings(max_examples=100)
@given(st.text().filter(lambda text: "</parameter>" not in text), st.data())
def test_any_text_comes_back(text: str, data: st.DataObject) -> None:
    whole = called(tagged(path=text))
    at = data.draw(st.integers(0, len(whole)))
    _, [(_, arguments)] = deltas(use(), [whole[:at], whole[at:]])
    assert json.loads(arguments) == {"path": text}


def test_a_text_is_given_as_it_grows_and_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from hamburger.server.tools import tag_calls

    escaped, escape = 0, tag_calls._escaped

    def counted(text: str) -> str:
        nonlocal escaped
        escaped += len(text)
        return escape(text)

    monkeypatch.setattr(tag_calls, "_escaped", counted)
    stream = use().stream()
    stream.add("<tool_call>\n<function=edit>\n<parameter=path>\n", is_final=False)
    for _ in range(500):
        delta = stream.add('a "line"\n', is_final=False)
        assert delta["tool_calls"][0]["function"]["arguments"].strip("\\n") in ('a \\"line\\"', '"a \\"line\\"')
    stream.add("</parameter>\n<parameter=lines>\n[1]\n</parameter>\n", is_final=False)
    for _ in range(100):
        stream.add(" ", is_final=False)
    assert escaped <= 2 * 500 * 10
