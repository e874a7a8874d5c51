"""Tool calls in text: each family, at every split point, cut short, and what only looks like a call."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hamburger.server.tools import tool_parsers, value_ends
from hamburger.server.tools.json_calls import ToolCall, calls_at
from hamburger.server.tools.tool_fields import Function, Tool
from hamburger.server.tools.tool_parsers import Family, Parser, family_of, list_parser, parser_of
from hamburger.server.tools.tool_use import ToolUse
from hamburger.server.tools.value_ends import ValueEnds
from streamed_calls import deltas

NAMES = ("get_weather", "add")
SCHEMAS: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
ARGS = '{"city": "Zürich \\"old\\" {town}", "days": [1, {"x": null}]}'
W = ToolCall("get_weather", ARGS)
A = ToolCall("add", '{"a":1}')

CASES: list[tuple[Family, str, str, list[ToolCall]]] = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>', "", [W]),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>\n'
        '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>',
        "Let me see.",
        [W, A],
    ),
    ("hermes", '<tool_call>{"arguments": {"a":1}, "name": "add"}</tool_call> done', " done", [A]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [ToolCall("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\":1}"}</tool_call>', "", [A]),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [ToolCall("add", "{}")]),
    ("hermes", "No call, but <tool_ and <tool_cal", "No call, but <tool_ and <tool_cal", []),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", "In a\n <tool_call> tag", "In a\n <tool_call> tag", []),
    ("hermes", 'a <tool_call>{"name": "add"}</tool_call> b <tool_call>', "a b <tool_call>", [ToolCall("add", "{}")]),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", "\n\nNo call\n", "\n\nNo call\n", []),
    (
        "hermes",
        'I <tool_call>think</tool_call> so.\n<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n'
        '<tool_call>{"x": 1}</tool_call> <tool_call>{"name":"add","arguments":{"a":1}}</tool_call>',
        'I <tool_call>think</tool_call> so.\n<tool_call>{"x": 1}</tool_call>',
        [A, A],
    ),
    ("hermes", '<tool_call><tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', "<tool_call>", [A]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a', "", [ToolCall("add", '{"a')]),
    ("hermes", 'a  \n {"name": "add"}', 'a  \n {"name": "add"}', []),
    ("llama3", f'{{"name": "get_weather", "parameters": {ARGS}}}', "", [W]),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a":1}}', "", [A]),
    ("llama3", '{"name": "add", "parameters": {"a":1}}; {"name": "add", "parameters": {"a":1}}', "", [A, A]),
    ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3", "Words { and } words", "Words { and } words", []),
    ("llama3", "A <|python_tag|>print(1)", "A <|python_tag|>print(1)", []),
    (
        "llama3",
        'I <|python_tag|> so:\n<|python_tag|>{"name": "add", "parameters": {"a":1}} Done. '
        '<|python_tag|>{"name": "add", "parameters": {"a":1}}',
        "I <|python_tag|> so: Done.",
        [A, A],
    ),
    ("llama3", '{"x": 1}\n<|python_tag|>{"name": "add", "parameters": {"a":1}}', '{"x": 1}', [A]),
    (
        "llama3",
        '{"name": "add", "parameters": {"a":1}} and <|python_tag|>{"name": "add", "parameters": {"a":1}}',
        "and",
        [A, A],
    ),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGS}}}]', "", [W]),
    ("granite", '[{"name": "add", "arguments": {"a":1}}]', "", [A]),
    ("granite", 'So:\n<|tool_call|> [{"name": "add", "arguments": {"a":1}}] ', "So:", [A]),
    ("granite", "A <|tool_call|> tag", "A <|tool_call|> tag", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGS}}}]', "", [W]),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a":1}}, {"name": "add"}]', "", [A, ToolCall("add", "{}")]),
    ("mistral", 'Yes. [TOOL_CALLS]add[ARGS]{"a":1}[TOOL_CALLS]add{"a":1}', "Yes.", [A, A]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]000000001[ARGS]{"a":1}[TOOL_CALLS]add[CALL_ID]2[ARGS] {"a":1}', "", [A, A]),
    ("mistral", "[TOOL_CALLS]add[CALL_ID]000000001", "[TOOL_CALLS]add[CALL_ID]000000001", []),
    ("mistral", '[TOOL_CALLS]add[CALL_ME]{"a":1}', '[TOOL_CALLS]add[CALL_ME]{"a":1}', []),
    ("mistral", "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
    ("mistral", "In a\n [TOOL_CALLS] tag", "In a\n [TOOL_CALLS] tag", []),
    ("mistral", "plain [TOOL", "plain [TOOL", []),
    (
        "mistral",
        'A [TOOL_CALLS] tag,\n[TOOL_CALLS] [{"name": "add", "arguments": {"a":1}}] and [TOOL_CALLS] b '
        '[TOOL_CALLS]add[ARGS]{"a":1}',
        "A [TOOL_CALLS] tag, and [TOOL_CALLS] b",
        [A, A],
    ),
    ("mistral", '[TOOL_CALLS][TOOL_CALLS][{"name": "add", "arguments": {"a":1}}]', "[TOOL_CALLS]", [A]),
    ("mistral", '[TOOL_CALLS][{"x": 1}]\n[TOOL_CALLS]add{"a":1}', '[TOOL_CALLS][{"x": 1}]', [A]),
    ("json", f' {{"name": "get_weather", "arguments": {ARGS}}}\n', "", [W]),
    ("json", '```json\n{"name": "add", "arguments": {"a":1}}\n```', "", [A]),
    ("json", '[{"name": "add", "arguments": {"a":1}},{"name": "add", "arguments": {"a":1}}]', "", [A, A]),
    ("json", '{"name": "add", "arguments": {"a":1}}\n{"name": "add", "arguments": {"a":1}}', "", [A, A]),
    ("json", '{"answer": 42}', '{"answer": 42}', []),
    ("json", "```python\nprint()\n```", "```python\nprint()\n```", []),
    ("json", "[1, 2]", "[1, 2]", []),
    ("json", "Hello!", "Hello!", []),
    ("json", '{"name": 3}', '{"name": 3}', []),
    ("json", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_a_whole_text(family: Family, text: str, content: str, calls: list[ToolCall]) -> None:
    parsed = parser_of(family, SCHEMAS)(text, True, ValueEnds())
    assert parsed.calls == calls
    assert parsed.content == content


def use_of(family: Family, **options: Any) -> ToolUse:
    tools = [Tool(type="function", function=Function(name=name)) for name in NAMES]
    return ToolUse(tools, "auto", family, **options)


def check_stream(family: Family, pieces: list[str]) -> None:
    use, text = use_of(family), "".join(pieces)
    content, calls = deltas(use, pieces)
    whole, whole_calls = use.stream().message(text)
    assert content == (whole or "")
    assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in whole_calls]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_every_split_point_streams_what_the_whole_says(
    family: Family, text: str, content: str, calls: list[ToolCall]
) -> None:
    for cut in range(len(text) + 1):
        check_stream(family, [text[:cut], text[cut:]])
    check_stream(family, [*text, ""])
    draw = random.Random(len(text))
    for _ in range(30):
        cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 8)))
        check_stream(family, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])


PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json\n", "```", '{"name": "add"'),
    *("[CALL_ID]", "[CALL_", "12"),
    *(', "arguments": ', '{"a": 1}', '"name"', "add", "text", "}", "]", "[", ", ", ";", ":", "\n", " ", '"', "\\", "{"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    st.sampled_from(["hermes", "llama3", "granite", "mistral", "pythonic", "json"]),
    st.lists(st.sampled_from(PIECES), max_size=12),
)
def test_streamed_and_whole_agree_on_anything(family: Family, parts: list[str]) -> None:
    check_stream(family, [*parts, ""])
    check_stream(family, [*"".join(parts), ""])
    content, calls = use_of(family).stream().message("".join(parts))
    assert calls or content == "".join(parts)


@given(st.lists(st.sampled_from(['"', "\\", "{", "}", "[", "]", "a", " ", '\\"', "é\n", "x" * 99, "1,"]), max_size=40))
def test_ends_of_a_text_that_grows_are_those_of_the_whole(parts: list[str]) -> None:
    ends, text = ValueEnds(), ""
    for part in ["{", *parts]:
        text += part
        for begin in (0, len(text) // 2, 0):
            assert ends.of(text, begin) == ValueEnds().of(text, begin)


class Counting:
    """A pattern that counts the characters that it has matched."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.count = pattern, 0

    def match(self, text: str, at: int) -> re.Match[str] | None:
        match = self.pattern.match(text, at)
        self.count += 0 if match is None else len(match[0])
        return match


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral", "olmo3", "pythonic", "json"])
@pytest.mark.parametrize(("head", "piece"), [('{"a": "', "text"), ('{"a": ["', 'text", "'), ('{"a": [', "[1],")])
def test_arguments_are_scanned_once_however_long_they_get(
    family: Family, head: str, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = [Counting(value_ends._OUTSIDE), Counting(value_ends._INSIDE)]
    monkeypatch.setattr(value_ends, "_OUTSIDE", patterns[0])
    monkeypatch.setattr(value_ends, "_INSIDE", patterns[1])
    stream, size = use_of(family).stream(), 0
    before = "".join(tool_parsers.MARKERS[family][:1]) if family not in tool_parsers.BARE else ""
    for part in [f'{before}{{"name": "add", "arguments": {head}', *[piece] * 1000]:
        stream.add(part, is_final=False)
        size += len(part)
    assert 1000 < sum(pattern.count for pattern in patterns) <= size


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral", "olmo3"])
def test_markers_that_begin_no_call_are_looked_at_once(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may repeat one for ever."""
    looked, calls = 0, calls_at

    def counted(*args: Any) -> Any:
        nonlocal looked
        looked += 1
        return calls(*args)

    monkeypatch.setattr("hamburger.server.tools.tool_parsers.calls_at", counted)
    stream, marker = use_of(family).stream(), tool_parsers.MARKERS[family][0]
    stream.add(f'{marker}{{"name": "add"}}', is_final=False)  # is one
    for _ in range(500):
        stream.add(f"{marker} no", is_final=False)
        stream.add(" call ", is_final=False)
    assert looked < 2500


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral", "olmo3"])
def test_words_are_searched_for_calls_once(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    searched, next_call = 0, tool_parsers._next_call

    def counted(text: str, begin: str, bare: str, start: int) -> int:
        nonlocal searched
        searched += len(text) - start
        return next_call(text, begin, bare, start)

    monkeypatch.setattr(tool_parsers, "_next_call", counted)
    stream = use_of(family).stream()
    for _ in range(1000):
        assert stream.add("words", is_final=False) == {"content": "words"}
    assert searched < 1000 * 20


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_arguments_come_back_as_they_were_written(value: Any) -> None:
    for ascii_only in (True, False):
        arguments = json.dumps({"value": value}, ensure_ascii=ascii_only)
        for family, text in (
            ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'),
            ("llama3", f'{{"name": "add", "parameters": {arguments}}}'),
            ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {arguments}}}]'),
            ("mistral", f"[TOOL_CALLS]add[ARGS]{arguments}"),
            ("json", f'{{"name": "add", "arguments": {arguments}}}'),
        ):
            parser: Parser = parser_of(family, SCHEMAS)  # type: ignore[arg-type]
            assert parser(text, True, ValueEnds()).calls == [ToolCall("add", arguments)]


def test_one_call_at_most_when_they_may_not_be_parallel() -> None:
    text = '[{"name": "add", "arguments": {"a":1}}, {"name": "add", "arguments": {"a":2}}]'
    _, calls = deltas(use_of("json", parallel=False), [*text])
    assert calls == [("add", '{"a":1}')]


def test_a_forced_list() -> None:
    text = '[{"name": "add", "arguments": {"a": 1}}, {"name": "x", "argum'
    assert list_parser(text, True, ValueEnds()).calls == [
        ToolCall("add", '{"a": 1}'),
        ToolCall("x", ""),
    ]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("... <tool_call>\n ...", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("respond with <|tool_call|> followed by a JSON list", "granite"),
        ("{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}", "olmo3"),
        ("in the format of [func_name1(params_name1=params_value1, ...), func_name2(params)]", "pythonic"),
        ("{{ messages }}", "json"),
        (None, "json"),
    ],
)
def test_the_family_is_read_from_the_template(template: str | None, family: Family) -> None:
    assert family_of(template) == family


def test_half_a_surrogate_pair_is_replaced() -> None:
    text = r'<tool_call>{"name": "add", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>'
    [call] = parser_of("hermes", SCHEMAS)(text, True, ValueEnds()).calls
    assert json.loads(call.arguments) == {"a": "\ufffd"}
    call.arguments.encode()
