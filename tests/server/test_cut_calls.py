"""A stop string or token within a call: the answer ends there, and no form of it says that the call is whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes import EOS
from serving import CHAT, HELLO, MODEL, serving, split, typed_events

ROOM: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 1024}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "w", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "w"}}
ARGUMENTS = '{"city": "Rom"}'
CALL = f'{{"name": "w", "arguments": {ARGUMENTS}}}'
CASES = [  # the model's text, tool_choice, stop, arguments as far as they come, whether they are whole
    (ARGUMENTS, NAMED, "ity", '{"c', False),
    (ARGUMENTS, NAMED, "}", '{"city": "Rom"', False),
    (ARGUMENTS, NAMED, "never", ARGUMENTS, True),
    (f"[{CALL}]", "required", "ity", '{"c', False),
    (f"[{CALL}]", "required", "never", ARGUMENTS, True),
    (CALL + " and more", "auto", " more", ARGUMENTS, True),
    (CALL, "auto", "Rom", '{"city": "', False),
]


@pytest.mark.parametrize(("text", "choice", "stop", "arguments", "is_whole"), CASES)
async def test_a_chat_says_stop(text: str, choice: Any, stop: str, arguments: str, is_whole: bool) -> None:
    fields = {"tools": [WEATHER], "tool_choice": choice, "stop": [stop]}
    async with serving([*split(text, *[1] * len(text)), [EOS]], **ROOM) as server:
        answer = await server.chat(**fields)
        chunks = await server.stream(CHAT, **fields)
    [whole] = answer["choices"]
    last = chunks[-1]["choices"][0]
    reason = "tool_calls" if is_whole and choice is not NAMED else "stop"
    assert whole["finish_reason"] == last["finish_reason"] == reason
    assert whole["stop_reason"] == last["stop_reason"] == (None if stop == "never" else stop)
    [call] = whole["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments
    pieces = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == arguments


@pytest.mark.parametrize(("text", "choice", "stop", "arguments", "is_whole"), CASES)
async def test_messages_say_stop_sequence(text: str, choice: Any, stop: str, arguments: str, is_whole: bool) -> None:
    kinds = {"required": {"type": "any"}, "auto": {"type": "auto"}}
    body = {
        "model": MODEL, "max_tokens": 90, "messages": HELLO, "stop_sequences": [stop],
        "tools": [{"name": "w", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "w"} if choice is NAMED else kinds[choice],
    }  # fmt: skip
    async with serving([*split(text, *[1] * len(text)), [EOS]], **ROOM) as server:
        answer = await server.ok("/v1/messages", body)
        told = typed_events((await server.post("/v1/messages", {**body, "stream": True})).text)
    ending = ("tool_use", None) if is_whole else ("stop_sequence", stop)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ending
    assert tuple(told[-2]["delta"].values()) == ending
    [use] = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert use["input"] == (json.loads(arguments) if is_whole else {})


@pytest.mark.parametrize(("text", "choice", "stop", "arguments", "is_whole"), CASES)
async def test_responses_have_an_incomplete_item(
    text: str, choice: Any, stop: str, arguments: str, is_whole: bool
) -> None:
    tools = [{"type": "function", "name": "w", "parameters": SCHEMA}]
    body = {
        "model": MODEL, "input": "Hi", "stop": [stop], "tools": tools,
        "tool_choice": {"type": "function", "name": "w"} if choice is NAMED else choice,
    }  # fmt: skip
    async with serving([*split(text, *[1] * len(text)), [EOS]], **ROOM) as server:
        answer = await server.ok("/v1/responses", body)
        told = typed_events((await server.post("/v1/responses", {**body, "stream": True})).text)
    status = "completed" if is_whole else "incomplete"
    for response in (answer, told[-1]["response"]):
        assert response["status"] == "completed"
        [item] = [item for item in response["output"] if item["type"] == "function_call"]
        assert (item["status"], item["arguments"]) == (status, arguments)
    assert [event["item"]["status"] for event in told if event["type"] == "response.output_item.done"][-1] == status


@pytest.mark.parametrize(
    ("text", "choice", "fields", "arguments"),
    [
        (ARGUMENTS, NAMED, {"stop_token_ids": [ord("o")]}, '{"city": "R'),
        (f"[{CALL}]", "required", {"stop_token_ids": [ord("o")]}, '{"city": "R'),
        (f"[{CALL}]", "required", {"stop_token_ids": [ord("]")]}, ARGUMENTS),
        (ARGUMENTS, NAMED, {"stop": ["}"], "include_stop_str_in_output": True}, ARGUMENTS),
    ],
)
async def test_arguments_tell_whether_it_is_whole(
    text: str, choice: Any, fields: dict[str, Any], arguments: str
) -> None:
    """Not what ended it: a stop token may, and a stop string that is shown may be its last character."""
    body = {
        "model": MODEL, "input": "Hi", **fields, "tools": [{"type": "function", "name": "w", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "w"} if choice is NAMED else choice,
    }  # fmt: skip
    async with serving([*split(text, *[1] * len(text)), [EOS]], **ROOM) as server:
        answer = await server.chat(**fields, tools=[WEATHER], tool_choice=choice)
        chunks = await server.stream(CHAT, **fields, tools=[WEATHER], tool_choice=choice)
        response = await server.ok("/v1/responses", body)
        told = typed_events((await server.post("/v1/responses", {**body, "stream": True})).text)
    is_whole = arguments == ARGUMENTS
    reason = "tool_calls" if is_whole and choice == "required" else "stop"
    for last in (answer["choices"][0], chunks[-1]["choices"][0]):
        assert last["finish_reason"] == reason
    for output in (response["output"], told[-1]["response"]["output"]):
        [item] = output
        assert (item["arguments"], item["status"]) == (arguments, "completed" if is_whole else "incomplete")
