"""Tools over HTTP: what the model is told, forced and free calls, streamed and whole, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio

from fakes import BOS, EOS, ByteTokenizer
from hamburger.engine.types.errors import TokenizerError
from serving import CHAT, HELLO, ByChoice, Served, serving, split

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rom"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ROOM: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 1024}
CALL = '{"name": "get_weather", "arguments": {"city": "Rom"}}'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def told(server: Served) -> str:
    """The prompt that the model got."""
    return bytes(server.runner.prompts[-1]).decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Served]:
    """One server, so that one process tries all grammars."""
    async with serving(**ROOM) as server:
        yield server


async def test_a_model_that_knows_no_tools_is_told_in_the_system_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    async with serving([*split(CALL, 9, 40, len(CALL) - 49), [EOS]], **ROOM) as server:
        answer = await server.chat(messages=[system, *HELLO], tools=[WEATHER, NOW])
        prompt = told(server)
    assert prompt.startswith("system: Be brief.\n\nYou can call these functions:\n")
    assert '"name": "get_weather"' in prompt
    assert prompt.count("system: ") == 1
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]) == ("function", {"name": "get_weather", "arguments": '{"city": "Rom"}'})
    assert call["id"].startswith("call_")


@pytest.mark.parametrize("sizes", [(len(CALL),), (4,) * 13 + (1,), (1,) * len(CALL), (20, 33)])
async def test_streamed_calls_are_those_of_the_whole_answer(sizes: tuple[int, ...]) -> None:
    async with serving([*split(CALL, *sizes), [EOS]], **ROOM) as server:
        chunks = await server.stream(CHAT, tools=[WEATHER])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"].get("name") for call in calls].count("get_weather") == 1
    assert sum("id" in call for call in calls) == 1
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rom"}'
    assert not any(delta.get("content") for delta in deltas)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "tool_calls"
    ]


async def test_words_stay_words() -> None:
    async with serving([*split("It is 3 o'clock.", 4, 6, 6), [EOS]], **ROOM) as server:
        answer = await server.chat(tools=[NOW], tool_choice="auto")
        chunks = await server.stream(CHAT, tools=[NOW])
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "It is 3 o'clock.", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "It is 3 o'clock."


async def test_a_named_function_gets_arguments_of_its_schema() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with serving([[*b'{"city": "Pa'], [*b'ris"} and more']], **ROOM) as server:
        answer = await server.chat(tools=[NOW, WEATHER], tool_choice=named)
        chunks = await server.stream(CHAT, tools=[NOW, WEATHER], tool_choice=named)
    [choice] = answer["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert choice["finish_reason"] == "stop"  # as OpenAI says of a forced function
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'


async def test_required_calls_follow_one_of_the_schemas() -> None:
    text = f'[{CALL}, {{"name": "now", "arguments": {{}}}}]'
    async with serving([[*text.encode()]], **ROOM) as server:
        answer = await server.chat(tools=[NOW, WEATHER], tool_choice="required")
        assert [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]] == [
            "get_weather",
            "now",
        ]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
    # The grammar refuses a city that is none, and a second call where one is allowed.
    for bad, options in ((text.replace("Rom", "Bonn"), {}), (text, {"parallel_tool_calls": False})):
        async with serving([[*bad.encode()]], **ROOM) as server:
            status, error = await server.refused(
                CHAT, {"messages": HELLO, "tools": [NOW, WEATHER], "tool_choice": "required", **options}
            )
            assert status == 400
            assert "grammar" in error["message"]


async def test_none_tells_the_model_nothing_and_finds_nothing() -> None:
    async with serving([[*CALL.encode()], [EOS]], **ROOM) as server:
        answer = await server.chat(tools=[WEATHER], tool_choice="none")
        assert "functions" not in told(server)
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_calls_and_their_results_come_back_as_messages() -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    async with serving([[EOS]], **ROOM) as server:
        await server.chat(messages=messages, tools=[NOW])
        assert 'assistant: [{"name": "now", "arguments": {"zone": "UTC"}}]\ntool: 12:00\n' in told(server)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": ', "{}"),  # as max_tokens cuts it
        ('{"a": 1,}', "{}"),
        ("[1]", "{}"),
        ("null", "{}"),
        (" ", "{}"),
        ("[" * 5000, "{}"),
        ('{"a": "\\ud800 \\ud83c\\udf89"}', '{"a": "\ufffd 🎉"}'),
    ],
)
async def test_a_chat_goes_on_behind_a_call_that_is_no_json(arguments: str, read: str) -> None:
    made = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "no JSON"},
    ]
    async with serving([[EOS]], **ROOM) as server:
        await server.chat(messages=messages, tools=[NOW])
        assert f'assistant: [{{"name": "now", "arguments": {read}}}]\ntool: no JSON\n' in told(server)


class Hermes(ByteTokenizer):
    """A tokenizer whose template knows tools, and whose calls begin with a special token."""

    tool_template = "{{ tools }}<tool_call>"

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [BOS] if text == "<tool_call>" else super().encode(text)

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return b"<tool_call>" if token_id == BOS else super().token_bytes(token_id, first=first)


async def test_a_special_token_that_begins_a_call_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ByteTokenizer", Hermes)
    monkeypatch.setattr("fake_engines.ByteTokenizer", Hermes)
    async with serving([[*b"Wait. ", BOS], [*CALL.encode()], [*b"</tool_call>", EOS]], **ROOM) as server:
        answer = await server.chat(tools=[WEATHER])
        chunks = await server.stream(CHAT, tools=[WEATHER])
        assert "functions" not in told(server)  # its template tells them
    message = answer["choices"][0]["message"]
    assert message["content"] == "Wait."
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Wait."


MADE = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [NOW, NOW]}, "tools", "one name"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice", '"required", {"type": "function", "function":'),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "now"}}, "tool_choice", '"function": {"name": .'),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [NOW], "guided_regex": "a"}, "guided_regex", "tool_choice to none"),
        ({"tools": [NOW], "guided_json": {"type": "foo"}}, "guided_json", "foo"),
        ({"tools": [NOW], "json_schema": "{"}, "json_schema", "no JSON"),
        ({"tools": [NOW], "tool_choice": allowed("auto", "x")}, "tool_choice", "'x'"),
        ({"tools": [NOW], "tool_choice": allowed("auto")}, "tool_choice", "allowed_tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}],
          "tool_choice": "required"}, "tools", "foo"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [MADE]}]}, "messages", "assistant"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ],
)  # fmt: skip
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused(shared: Served, fields: dict[str, Any], param: str, what: str) -> None:
    status, error = await shared.refused(CHAT, {"messages": HELLO, **fields})
    assert (status, error["param"]) == (400, param)
    assert what in error["message"]


async def test_the_whole_answer_of_many_choices_keeps_their_calls_apart() -> None:
    runner = ByChoice([[*CALL.encode()], [EOS]], [[*b"words"], [EOS]])
    async with serving(runner=runner, **ROOM) as server:
        answer = await server.chat(tools=[WEATHER], n=2)
    assert ["tool_calls" in choice["message"] for choice in answer["choices"]] == [True, False]
    assert json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rom"}


ANSWER = '{"text": "It is sunny."}'
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": TEXT, "strict": True}}


async def test_with_a_format_an_answer_is_that_or_calls() -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "response_format": FORM, "n": 2, "logprobs": True}
    runner = ByChoice(split(ANSWER, 9, 5, len(ANSWER) - 14), [*split(CALL, 20, len(CALL) - 20), [EOS]])
    async with serving(runner=runner, max_group=60, **ROOM) as server:
        whole = await server.chat(**asked)
        assert "Else answer in JSON" in told(server)
        chunks = await server.stream(CHAT, **asked, stream_options={"include_usage": True})
    answer, call = whole["choices"]
    assert (answer["message"]["content"], answer["finish_reason"]) == (ANSWER, "stop")
    assert "tool_calls" not in answer["message"]
    assert (call["message"]["content"], call["finish_reason"]) == (None, "tool_calls")
    assert call["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rom"}'}
    assert len(answer["logprobs"]["content"]) == len(ANSWER)
    *chunks, last = chunks
    assert last["usage"] == {**whole["usage"], "prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    told_of = [[chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == i] for i in (0, 1)]
    contents = [choice["delta"].get("content", "") for choice in told_of[0]]
    assert contents[:3] == [ANSWER[:9], ANSWER[9:14], ANSWER[14:]]  # as it comes
    pieces = [piece["function"] for choice in told_of[1] for piece in choice["delta"].get("tool_calls", [])]
    assert (pieces[0]["name"], "".join(piece["arguments"] for piece in pieces)) == ("get_weather", '{"city": "Rom"}')
    assert [choices[-1]["finish_reason"] for choices in told_of] == ["stop", "tool_calls"]


@pytest.mark.parametrize(
    ("fields", "text", "what"),
    [
        ({}, "It is sunny.", "grammar"),
        ({}, CALL.replace("get_weather", "other"), "grammar"),
        ({"response_format": {"type": "json_object"}}, "[1]", "grammar"),
        ({"guided_json": json.dumps(TEXT), "response_format": None}, "{}", "grammar"),
        ({"tool_choice": "none"}, CALL, "grammar"),
        ({"tool_choice": "required"}, ANSWER, "grammar"),
        ({"tool_choice": "required"}, f"[{CALL}]", None),
        ({"tool_choice": allowed("auto", "now")}, CALL, "grammar"),
        ({"tool_choice": allowed("required", "now")}, f"[{CALL}]", "grammar"),
        ({"tool_choice": allowed("required", "now", "get_weather")}, f"[{CALL}]", None),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_format_and_a_choice_let_a_model_write(
    shared: Served, fields: dict[str, Any], text: str, what: str | None
) -> None:
    asked = {"messages": HELLO, "tools": [WEATHER, NOW], "response_format": FORM, **fields}
    shared.runner.by_choice = ([[*text.encode()], [EOS]],)
    response = await shared.post(CHAT, asked)
    if fields.get("tool_choice") != "none":
        assert "get_weather" in told(shared)
    assert response.status_code == (200 if what is None else 400)
    assert (what or "get_weather") in response.text


class NoToolRole(ByteTokenizer):
    """A template that leaves out whoever is neither user nor assistant."""

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return super().apply_chat_template(
            [m for m in messages if m["role"] in ("system", "user", "assistant")], **kwargs
        )


async def test_a_result_is_told_though_the_template_leaves_its_role_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ByteTokenizer", NoToolRole)
    made = {"id": "call_1", "function": {"name": "now", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "12:34"}
    async with serving([[EOS]], **ROOM) as server:
        await server.chat(messages=[*HELLO, {"role": "assistant", "tool_calls": [made]}, result], tools=[NOW])
        assert told(server).endswith("user: Result of now: 12:34\nassistant: ")


class Alternating(NoToolRole):
    """One that refuses two turns of the user without one of the assistant between them, too."""

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        roles = [message["role"] for message in messages]
        if ("user", "user") in pairwise(roles):
            raise TokenizerError("roles must alternate")
        return super().apply_chat_template(messages, **kwargs)


async def test_results_and_what_the_user_says_behind_them_are_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ByteTokenizer", Alternating)
    made = [{"id": f"call_{n}", "function": {"name": "now", "arguments": "{}"}} for n in range(2)]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n}:00"} for n in range(2)]
    messages = [*HELLO, {"role": "assistant", "tool_calls": made}, *results]
    async with serving([[EOS]], **ROOM) as server:
        await server.chat(messages=messages, tools=[NOW])
        assert told(server).endswith("user: Result of now: 0:00\n\nResult of now: 1:00\nassistant: ")
        await server.chat(messages=[*messages, {"role": "user", "content": "So?"}], tools=[NOW])
        assert told(server).endswith("\n\nResult of now: 1:00\n\nSo?\nassistant: ")
        status, error = await server.refused(CHAT, {"messages": [*HELLO, *HELLO]})  # what is wrong stays wrong
        assert (status, error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"$id": "https://a.example/f", "properties": {"a": {"$ref": "#/$defs/one"}}}, '{"a": 1}'),  # as Go's write it
        ({"properties": {"a": {"$ref": "#one"}}}, '{"a": 1}'),
        ({"properties": {"a": {"const": {"$ref": "#/$defs/one"}}}}, '{"a": {"$ref": "#/$defs/one"}}'),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_required_calls_follow_what_a_schema_refers_to(
    shared: Served, schema: dict[str, Any], arguments: str
) -> None:
    parameters = {**schema, "required": ["a"], "$defs": {"one": {"$anchor": "one", "const": 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = f'[{{"name": "f", "arguments": {arguments}}}]'
    shared.runner.by_choice = ([*split(text, len(text)), [EOS]],)
    answer = await shared.chat(tools=[tool], tool_choice="required")
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == arguments


async def test_forced_arguments_are_an_object_though_the_schema_does_not_say_so() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"format": "binary"}}}}}
    named = {"type": "function", "function": {"name": "f"}}
    async with serving([[*b"5"]], **ROOM) as server:
        status, _ = await server.refused(CHAT, {"messages": HELLO, "tools": [tool], "tool_choice": named})
    assert status == 400  # the script writes what the grammar forbids
