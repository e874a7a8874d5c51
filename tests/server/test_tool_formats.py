"""Tools beside formats, and under templates that leave the role of their results out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio

from fakes import EOS, ByteTokenizer
from hamburger.engine.types.errors import TokenizerError
from serving import CHAT, HELLO, ByChoice, Served, serving, split
from tools_asked import CALL, NOW, ROOM, WEATHER, allowed, told


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Served]:
    """One server, so that one process tries all grammars."""
    async with serving(**ROOM) as server:
        yield server


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
