"""What holds an answer that may call: free text until a call begins that follows its schema (`strict: true`), of tools
that may be called; or JSON of a format, or calls alone.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes import BOS, EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.grammar.json_numbers import is_of_json
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.source import GrammarSource
from hamburger.server.tools.reasoning import Markers
from hamburger.server.tools.tool_fields import AllowedTools, Tool
from hamburger.server.tools.tool_parsers import MARKERS, Family
from hamburger.server.tools.tool_use import ToolUse
from hamburger.server.tools.value_ends import ValueEnds
from serving import CHAT, HELLO, serving, split
from streamed_calls import deltas

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rom"]}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}
ROOM: dict[str, Any] = {"max_model_len": 4096, "num_blocks": 2048}
GOOD, BAD = '{"city": "Rom"}', '{"city": "Bonn"}'


def call(arguments: str = GOOD, name: str = "get_weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


# What is written -> whether it is allowed.
TEXTS: dict[Family, dict[str, bool]] = {
    "hermes": {
        f"I look.\n<tool_call>\n{call()}\n</tool_call>": True,
        f"<tool_call>{call()}</tool_call>\n<tool_call>\n{call('{}', 'now')}\n</tool_call> Done.": True,
        f"<tool_call>\n{call(BAD)}": False,
        f"<tool_call>\n{call(name='other')}": False,
        "<tool_call> nothing": False,
        "1 < 2, and <tool is no call": True,
        f"{call(BAD)} is JSON.": True,
    },
    "mistral": {
        f"[TOOL_CALLS][{call()}, {call('{}', 'now')}]": True,
        f"So: [TOOL_CALLS]get_weather[ARGS]{GOOD}": True,
        f"[TOOL_CALLS]get_weather{GOOD}": True,
        f"[TOOL_CALLS][{call(BAD)}": False,
        f"[TOOL_CALLS]get_weather[ARGS]{BAD}": False,
        "[TOOL] is a text": True,
    },
    "llama3": {
        f"<|python_tag|>{call(key='parameters')}; {call('{}', 'now', 'parameters')}": True,
        call(key="parameters"): True,
        f"[{call()}]": True,
        call(BAD, key="parameters"): False,
        f"<|python_tag|>{call(BAD)}": False,
        '{"a": 1} is JSON.': True,
        f"Words, then {call(BAD)}": True,  # no call: it comes last
    },
    "json": {
        call(): True,
        f"[{call()}, {call('{}', 'now')}]": True,
        f"{call()}; {call()}": True,
        call(BAD): False,
        call(name="other"): False,
        f"```json\n{call(BAD)}\n```": False,
        "```json\n[1]\n```": True,
        "Rom is a city.": True,
    },
}
TEXTS["olmo3"] = {text.replace("tool_call>", "function_calls>"): said for text, said in TEXTS["hermes"].items()}
TEXTS["granite"] = TEXTS["json"] | {
    f"<|tool_call|>[{call()}, {call('{}', 'now')}]": True,
    f"I look. <|tool_call|> [{call()}]": True,
    f"<|tool_call|>[{call(BAD)}": False,
    "<|tool_call|> nothing": False,
}
TEXTS["pythonic"] = TEXTS["json"] | {
    '[get_weather(city="Rom")]': False,  # no grammar holds that: JSON is written instead
    "\n[ now (": False,
    "[get_weather]": True,
    '[other(city="Rom")]': True,
}


class Marked(ByteTokenizer):
    """The first marker of a family is a special token."""

    marker = ""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        head, found, tail = text.partition(self.marker)
        return [*super().encode(head), *([BOS, *self.encode(tail)] if found else [])]

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return self.marker.encode() if token_id == BOS else super().token_bytes(token_id, first=first)


FORM = {"type": "object", "properties": {"text": {"$ref": "#/$defs/text"}}, "required": ["text"],
        "additionalProperties": False, "$defs": {"text": {"type": "string"}}}  # fmt: skip
NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "additionalProperties": True,
}
# Beside FORM: what is written -> its calls, content; None: it is not allowed.
OR_CALLS: dict[Family, dict[str, tuple[int, str] | None]] = {
    "hermes": {
        f"<tool_call>\n{call()}\n</tool_call>": (1, ""),
        f"<tool_call>{call()}</tool_call>\n<tool_call>\n{call('{}', 'now')}\n</tool_call>": (2, ""),
        f"<tool_call>{call()}</tool_call> Done.": None,
        f"I look. <tool_call>{call()}</tool_call>": None,
        f"<tool_call>{call(BAD)}": None,
        f'<tool_call>{call()}</tool_call>{{"text": ""}}': None,
        call(): None,
        '{"text": "<tool_call>{}"}': (0, '{"text": "<tool_call>{}"}'),
    },
    "mistral": {
        f"[TOOL_CALLS][{call()}, {call('{}', 'now')}]": (2, ""),
        f"[TOOL_CALLS]get_weather[ARGS]{GOOD}[TOOL_CALLS]now{{}}": (2, ""),
        f"[TOOL_CALLS]get_weather{BAD}": None,
        "[TOOL_CALLS]other{}": None,
        '{"text": "[TOOL_CALLS]now{}"}': (0, '{"text": "[TOOL_CALLS]now{}"}'),
    },
    "llama3": {
        f"<|python_tag|>{call(key='parameters')}; {call('{}', 'now', 'parameters')}": (2, ""),
        call(key="parameters"): (1, ""),
        f"[{call()}, {call('{}', 'now')}]": (2, ""),
        f"<|python_tag|>{call(BAD)}": None,
        f"{call()} Done.": None,
        '{"text": "<|python_tag|>"}': (0, '{"text": "<|python_tag|>"}'),
    },
    "json": {
        call(): (1, ""),
        f"[{call()}, {call('{}', 'now')}]": (2, ""),
        f"[{call(BAD)}]": None,
        call(BAD): None,
        "[]": None,
        '{"text": "a"}': (0, '{"text": "a"}'),
    },
}
OR_CALLS["olmo3"] = {
    text.replace("tool_call>", "function_calls>"): said and (said[0], said[1].replace("tool_call>", "function_calls>"))
    for text, said in OR_CALLS["hermes"].items()
}
OR_CALLS["granite"] = OR_CALLS["json"] | {
    f"<|tool_call|>[{call()}, {call('{}', 'now')}]": (2, ""),
    f"<|tool_call|>[{call(BAD)}]": None,
    '{"text": "<|tool_call|>"}': (0, '{"text": "<|tool_call|>"}'),
}
OR_CALLS["pythonic"] = OR_CALLS["json"] | {'[get_weather(city="Rom")]': None}
FOR_ALL: dict[str, tuple[int, str] | None] = {
    '{"text": "é"}': (0, '{"text": "é"}'), '{"text": 1}': None, "{}": None, "Rom is a city.": None, "": None,
}  # fmt: skip


def is_allowed(use: ToolUse, tokenizer: ByteTokenizer, text: str, thought: Markers | None = None) -> bool:
    """Whether an answer may be this, and end there."""
    source = use.open_grammar(tokenizer, thought)
    assert source is not None
    matcher = Grammars(lambda: tokenizer, VOCAB_SIZE, [EOS]).compile(source.write()).deep_copy()
    ids = [*tokenizer.encode(text), EOS]
    return bool(matcher.validate_tokens(ids) == len(ids))


def use_of(family: Family, *tools: dict[str, Any], **options: Any) -> ToolUse:
    return ToolUse([Tool.model_validate(tool) for tool in tools], options.pop("choice", None), family, **options)


@pytest.mark.parametrize(
    ("family", "text", "expected"), [(f, t, allowed) for f, texts in TEXTS.items() for t, allowed in texts.items()]
)
def test_a_call_follows_its_schema_and_all_else_is_free(family: Family, text: str, expected: bool) -> None:
    use = use_of(family, WEATHER, LOOSE)
    assert is_allowed(use, ByteTokenizer(), text) == expected
    for marker in MARKERS[family][:1]:
        tokenizer = Marked()
        tokenizer.marker = marker
        assert is_allowed(use, tokenizer, text) == expected
    if expected:
        calls = use.parser(text, True, ValueEnds()).calls
        assert all(set(json.loads(c.arguments)) <= {"city"} for c in calls)


@pytest.mark.parametrize("family", TEXTS)
def test_what_is_not_strict_is_free(family: Family) -> None:
    assert use_of(family, LOOSE).open_grammar(ByteTokenizer(), None) is None
    assert use_of(family, WEATHER, choice="required").open_grammar(ByteTokenizer(), None) is None  # it is forced


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [(f, t, said) for f, texts in OR_CALLS.items() for t, said in (texts | FOR_ALL).items()],
)
def test_with_a_format_an_answer_is_that_or_calls(family: Family, text: str, expected: tuple[int, str] | None) -> None:
    use = use_of(family, WEATHER, LOOSE, form=GrammarSource("json", FORM))
    for marker in ("", *MARKERS[family][:1]):
        tokenizer = Marked()
        tokenizer.marker = marker or "no marker"
        is_inside = bool(marker) and f': "{marker}' in text  # no text has a special token
        assert is_allowed(use, tokenizer, text) == (expected is not None and not is_inside)
    # A thought may stand before, and must where it has begun.
    assert is_allowed(use, ByteTokenizer(), text, Markers("<think>", "</think>")) == (expected is not None)
    assert is_allowed(use, ByteTokenizer(), f'<think>"\n</think>\n\n{text}', Markers("<think>", "</think>")) == (
        expected is not None
    )
    assert is_allowed(use, ByteTokenizer(), f"Hm.</think>{text}", Markers("", "</think>")) == (expected is not None)
    assert not is_allowed(use, ByteTokenizer(), text, Markers("", "</think>"))
    if expected is not None:
        content, calls = deltas(use, [*text])
        assert (len(calls), content) == expected
        whole, whole_calls = use.stream().message(text)
        assert ([(c["function"]["name"], c["function"]["arguments"]) for c in whole_calls], whole or "") == (
            calls,
            content,
        )
        if not calls:  # as it comes, and not at its end
            assert use.stream().add(text[:3], is_final=False) == {"content": text[:3]}


@pytest.mark.parametrize("family", OR_CALLS)
def test_with_a_format_one_call_may_be_all_and_names_are_no_calls(family: Family) -> None:
    one = use_of(family, WEATHER, LOOSE, form=GrammarSource("json", NAMED), parallel=False)
    source = one.open_grammar(ByteTokenizer(), None)
    assert source is not None
    assert is_of_json(source.write())  # numbers have an end
    for text, said in OR_CALLS[family].items():
        if said is not None and said[0]:
            assert is_allowed(one, ByteTokenizer(), text) == (said[0] == 1)
    for text in ('{"name": "now", "age": 3}', '{"name": "now"}', '{"name": "Anna", "arguments": {}}'):
        assert is_allowed(one, ByteTokenizer(), text)
        assert deltas(one, [*text]) == (text, [])


@pytest.mark.parametrize("family", OR_CALLS)
def test_only_allowed_tools_are_called(family: Family) -> None:
    choice = AllowedTools.model_validate({"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}})  # fmt: skip
    marked = {"hermes": "<tool_call>{}</tool_call>", "mistral": "[TOOL_CALLS][{}]"}
    text = {**marked, "olmo3": "<function_calls>{}</function_calls>"}.get(family, "{}")
    for options in ({}, {"form": GrammarSource("json", FORM)}):
        use = use_of(family, WEATHER, LOOSE, choice=choice, **options)
        assert [tool["function"]["name"] for tool in use.for_template] == ["get_weather", "now"]
        assert is_allowed(use, ByteTokenizer(), text.replace("{}", call(BAD, "now")))
        assert not is_allowed(use, ByteTokenizer(), text.replace("{}", call()))


@pytest.mark.parametrize("lengths", [None, (7, 20)])
async def test_over_http(lengths: tuple[int, int] | None) -> None:
    text = call()
    groups = [[*text.encode()]] if lengths is None else split(text, *lengths, len(text) - sum(lengths))
    async with serving([*groups, [EOS]], **ROOM) as server:
        answer = await server.chat(tools=[WEATHER, LOOSE])
        chunks = await server.stream(CHAT, tools=[WEATHER, LOOSE])
    [made] = answer["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": GOOD}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == GOOD


async def test_what_strict_forbids_comes_where_nothing_is_strict() -> None:
    body = {"messages": HELLO, "tools": [LOOSE]}
    async with serving([[*call(BAD, "now").encode()], [EOS]], **ROOM) as server:
        answer = await server.ok(CHAT, body)
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == BAD
        strict = {**LOOSE, "function": {**LOOSE["function"], "strict": True}}  # type: ignore[dict-item]
        status, error = await server.refused(CHAT, {**body, "tools": [strict]})
        assert status == 400
        assert "grammar" in error["message"]


async def test_a_schema_that_cannot_be_followed_is_refused_by_name() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}, "strict": True}}
    async with serving(**ROOM) as server:
        status, error = await server.refused(CHAT, {"messages": HELLO, "tools": [tool]})
    assert (status, error["param"]) == (400, "tools")


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_in_the_other_forms_of_a_chat(api: str) -> None:
    function = {"name": "now", "strict": True}
    bodies: dict[str, dict[str, Any]] = {
        "responses": {"input": "a", "tools": [{"type": "function", "parameters": PARAMETERS, **function}]},
        "messages": {"max_tokens": 99, "messages": HELLO, "tools": [{"input_schema": PARAMETERS, **function}]},
    }
    for arguments, expected in ((GOOD, 200), (BAD, 400)):
        async with serving([[*call(arguments, "now").encode()], [EOS]], **ROOM) as server:
            response = await server.client.post(f"/v1/{api}", json=bodies[api])
            assert response.status_code == expected
            assert ("grammar" in response.text) == (expected == 400)


@pytest.mark.parametrize("family", ["json", "hermes"])
@pytest.mark.parametrize("compact", [True, False])
def test_an_answer_beside_calls_is_as_compact_as_was_asked(family: Family, compact: bool) -> None:
    use = use_of(family, WEATHER, form=GrammarSource("json", FORM, compact))
    assert is_allowed(use, ByteTokenizer(), '{"text": "a"}')
    assert is_allowed(use, ByteTokenizer(), '{\n  "text": "a"}') is not compact
