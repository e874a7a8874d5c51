"""/v1/messages: Anthropic's form of a chat. Its own client runs in tests/interop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest
import pytest_asyncio

from fakes import EOS
from serving import MODEL, ByChoice, Served, serving, split, typed_events

TEXT = "Hello wörld"
HELLO = [*split(TEXT, 3, 4, 4, 1), [EOS]]
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "w", "input_schema": SCHEMA}
CALL = '{"city": "Rom"}'
ROOM: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 1024}
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "messages": HI}
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}
GOES_ON = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "{"}]
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}


async def stream(server: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events, whose names and types agree."""
    return typed_events((await server.post(MESSAGES, {**ASKED, "stream": True, **fields})).text)


async def test_whole_and_streamed() -> None:
    async with serving(HELLO) as server:
        whole = await server.ok(MESSAGES, {**ASKED, "system": [{"type": "text", "text": "Be brief."}]})
        assert bytes(server.runner.prompts[-1]) == b"system: Be brief.\nuser: Hi\nassistant: "
        assert whole.pop("id").startswith("msg_")
        usage = whole.pop("usage")
        assert whole == {
            "type": "message", "role": "assistant", "model": MODEL, "content": [{"type": "text", "text": TEXT}],
            "stop_reason": "end_turn", "stop_sequence": None,
        }  # fmt: skip
        assert (usage["input_tokens"], usage["output_tokens"], usage["macro_steps"]) == (38, 13, 5)
        told = await stream(server)
    start, opened, *deltas, closed, delta, stop = told
    assert (start["type"], start["message"]["content"], start["message"]["stop_reason"]) == ("message_start", [], None)
    assert opened["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in deltas) == TEXT
    assert {event["index"] for event in (opened, *deltas, closed)} == {0}
    assert (closed["type"], stop["type"]) == ("content_block_stop", "message_stop")
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 13


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "Hel", "max_tokens", None),
        ({"stop_sequences": ["lo"]}, "Hel", "stop_sequence", "lo"),
        ({}, TEXT, "end_turn", None),
    ],
)
async def test_why_it_ended(fields: dict[str, Any], text: str, reason: str, sequence: str | None) -> None:
    async with serving(HELLO) as server:
        whole = await server.ok(MESSAGES, {**ASKED, **fields})
        told = await stream(server, **fields)
    assert whole["content"][0]["text"] == text
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert told[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_calls_and_what_they_gave() -> None:
    turns = [
        *HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rom"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    fields = {"messages": turns, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}
    async with serving([*split(CALL, 5, 5, len(CALL) - 10), [EOS]], **ROOM) as server:
        whole = await server.ok(MESSAGES, {**ASKED, **fields})
        prompt = bytes(server.runner.prompts[-1]).decode()
        told = await stream(server, **fields)
    said = '[{"name": "get_weather", "arguments": {"city": "Rom"}}]'
    assert prompt.endswith(f"assistant: Let me see.\n{said}\ntool: sunny\nuser: And now?\nassistant: ")
    [use] = whole["content"]
    assert (use["type"], use["name"], use["input"], whole["stop_reason"]) == (
        "tool_use", "get_weather", {"city": "Rom"}, "tool_use"
    )  # fmt: skip
    opened = told[1]["content_block"]
    assert (opened["type"], opened["input"]) == ("tool_use", {})
    pieces = [event["delta"]["partial_json"] for event in told if event["type"] == "content_block_delta"]
    assert ("".join(pieces), len(pieces)) == (CALL, 3)
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(("written", "read"), [('{"a": "\\ud800"}', {"a": "\ufffd"}), ("[" * 600 + "]" * 600, {})])
async def test_a_call_that_no_client_could_read_is_no_failure(written: str, read: dict[str, Any]) -> None:
    text = f'{{"name": "get_weather", "arguments": {written}}}'
    async with serving([*split(text, len(text)), [EOS]], **ROOM) as server:
        whole = await server.ok(MESSAGES, {**ASKED, "max_tokens": 1500, "tools": [WEATHER]})
    assert whole["content"][0]["input"] == read


async def test_text_and_a_call_are_two_blocks() -> None:
    text = 'I look. {"name": "get_weather", "arguments": {"city": "Rom"}}'
    async with serving([*split(text, 8, 30, len(text) - 38), [EOS]], **ROOM) as server:
        whole = await server.ok(MESSAGES, {**ASKED, "max_tokens": 90, "tools": [WEATHER]})
        told = await stream(server, max_tokens=90, tools=[WEATHER])
    kinds = [block["type"] for block in whole["content"]]
    assert [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"] == kinds
    assert [event["index"] for event in told if event["type"] == "content_block_stop"] == list(range(len(kinds)))


@pytest.mark.parametrize("cut", [40, 47, 52, 53])
async def test_text_behind_a_call_is_told_behind_its_input(cut: int) -> None:
    """Also where one group has the end of that and its beginning."""
    text = f'{{"name": "get_weather", "arguments": {CALL}}} Done.'
    async with serving([*split(text, cut, len(text) - cut), [EOS]], **ROOM) as server:
        told = await stream(server, max_tokens=90, tools=[WEATHER])
    blocks = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    assert blocks == ["tool_use", "text"]
    deltas = [event for event in told if event["type"] == "content_block_delta"]
    assert "".join(event["delta"]["partial_json"] for event in deltas if event["index"] == 0) == CALL
    assert "".join(event["delta"]["text"] for event in deltas if event["index"] == 1) == "Done."


async def test_an_answer_goes_on_with_the_assistants_last_words() -> None:
    async with serving(HELLO) as server:
        await server.ok(MESSAGES, {**ASKED, "messages": [*HI, {"role": "assistant", "content": "I say:"}]})
        assert bytes(server.runner.prompts[-1]).startswith(b"user: Hi\nassistant: I say:")
        assert not bytes(server.runner.prompts[-1]).endswith(b"assistant: ")


async def test_an_answer_may_have_to_follow_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with serving([*split('{"a": 1}', 5, 3), [*b"more"]]) as server:
        whole = await server.ok(
            MESSAGES, {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
        )
    assert json.loads(whole["content"][0]["text"]) == {"a": 1}


async def test_tokens_are_counted_as_they_are_used() -> None:
    body = {"model": MODEL, "messages": HI, "system": "Be brief.", "tools": [WEATHER]}
    async with serving(HELLO, **ROOM) as server:
        # Also of what is too long: who counts may want to know what to cut.
        long = await server.ok(COUNT, {"messages": [{"role": "user", "content": "a" * 9000}]})
        assert long["input_tokens"] > 9000
        counted = await server.ok(COUNT, body)
        used = (await server.ok(MESSAGES, {**body, "max_tokens": 5}))["usage"]
    assert counted == {"input_tokens": used["input_tokens"]}


@pytest.mark.parametrize(
    "header",
    [
        {"X-Api-Key": "secret"},
        {"Authorization": "Bearer secret"},
        {"X-Api-Key": "secret", "Authorization": "Basic dXNlcjpwYXNz"},  # which a proxy in front asked for
        {"X-Api-Key": "secret", "Authorization": "Bearer token"},  # Anthropic's clients that were given both
        {"X-Api-Key": "key", "Authorization": "Bearer secret"},
    ],
)
async def test_a_key_comes_in_either_header(header: dict[str, str]) -> None:
    async with serving(HELLO, settings={"api_key": "secret"}) as server:
        assert (await server.post(MESSAGES, ASKED, headers=header)).status_code == 200
        for wrong in ({}, {"X-Api-Key": "other"}, {"X-Api-Key": "other", "Authorization": "Bearer another"}):
            response = await server.post(MESSAGES, ASKED, headers=wrong)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[Served]:
    async with serving(HELLO) as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": 9999}, "max_tokens", "maximum context length is 256"),
        ({"max_tokens": 9999}, "max_tokens", "and max_tokens is 9999"),
        ({"stop_sequences": ["x"] * 300}, "stop_sequences", "stop_sequences holds 300 strings"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "its type is 'image'"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages", "[0]: it must be an object with a type"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages", "messages[0].content[0]: it must be an object"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "a text or a list of blocks"),
        ({"messages": [{"role": "user", "content": "a" * 999}]}, "messages", "maximum context length is 256"),
        ({"system": {}}, "system", "a text or a list of blocks"),
        ({"system": "x", "messages": [{"role": "user", "content": [USE]}]}, "messages", "messages[0]: a block of the"),
        ({"messages": [*HI, {"role": "assistant", "content": [RESULT]}]}, "messages", "of the role user alone"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages", "send its tool_result"),
        ({"messages": GOES_ON, "output_config": {"format": FORMAT}}, "messages", "An answer with a format begins anew"),
        ({"messages": GOES_ON, "tools": [WEATHER], "tool_choice": {"type": "any"}}, "messages", "a forced call begins"),
        ({"tool_choice": "auto"}, "tool_choice", "it must be an object"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools", "told of all tools"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code_execution_20260521"]}]}, "tools", "only the model calls"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format", "use output_config.format"),
        ({"compaction": {}}, "compaction", "not supported"),
        ({"fallbacks": [{"model": "x"}]}, "fallbacks", "not supported"),
        ({"speed": "fast"}, "speed", "not supported"),
        ({"service_tier": 5}, "service_tier", "not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking", "no budget of thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking", "budget_tokens"),
        ({"output_config": {"effort": "high"}}, "output_config", "reads neither 'reasoning_effort' nor"),
        ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "the server runs no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice", "name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"stop_sequences": [""]}, "stop_sequences", "empty"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
        ({"stop": ["x"]}, "stop", "stop_sequences"),
        ({"n": 2}, "n", "one answer at a time"),
        ({"response_format": {"type": "json_object"}}, "response_format", "output_config.format"),
        ({"repetition_penalty": 1.2}, "repetition_penalty", "chat completions"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}}, "output_config", "foo"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused_names_its_field(refusing: Served, fields: dict[str, Any], param: str, told: str) -> None:
    response = await refusing.post(MESSAGES, {**ASKED, **fields})
    answer = response.json()
    assert response.status_code == 400
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert answer["error"]["param"] == param
    assert told in answer["error"]["message"]
    assert refusing.runner.num_steps == 0


async def test_a_conversation_on_the_server_is_refused_so_that_clients_send_it_whole(refusing: Served) -> None:
    for path in (MESSAGES, COUNT):
        response = await refusing.post(path, {**ASKED, "thread": {"type": "create"}})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "thread")
        assert error["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"system": ""}, "user: Hi\n"),
        ({"system": []}, "user: Hi\n"),
        ({"system": [{"type": "text", "text": ""}]}, "user: Hi\n"),
        ({"messages": [*HI, {"role": "system", "content": "Be brief."}]}, "user: Hi\nsystem: Be brief.\n"),
    ],
)
async def test_what_the_system_says(fields: dict[str, Any], prompt: str) -> None:
    async with serving(HELLO) as server:
        await server.ok(MESSAGES, {**ASKED, **fields})
        assert bytes(server.runner.prompts[-1]).decode() == f"{prompt}assistant: "


async def test_names_of_tools_may_have_128_characters() -> None:
    async with serving([*split(CALL, len(CALL)), [EOS]], **ROOM) as server:
        tool = {**WEATHER, "name": "a" * 128}
        whole = await server.ok(
            MESSAGES, {**ASKED, "tools": [tool], "tool_choice": {"type": "tool", "name": "a" * 128}}
        )
        assert (await server.post(MESSAGES, {**ASKED, "tools": [{**tool, "name": "a" * 129}]})).status_code == 400
    assert whole["content"][0]["name"] == "a" * 128


async def test_what_anthropic_s_clients_read_beside_answers() -> None:
    async with serving(HELLO) as server:
        response = await server.post(MESSAGES, ASKED, headers={"X-Request-Id": "mine"})
        assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
        listed = (await server.client.get("/v1/models")).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, MODEL, MODEL)
    [card] = listed["data"]
    assert (card["type"], card["display_name"]) == ("model", MODEL)
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]


async def test_other_errors_have_the_same_shape() -> None:
    async with serving(runner=ByChoice(HELLO, fail_at_step=3)) as server:
        unknown = await server.post(MESSAGES, {**ASKED, "model": "other"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        assert (await server.client.get(MESSAGES)).json()["type"] == "error"
        told = await stream(server)
        assert (told[-1]["type"], told[-1]["error"]["type"]) == ("error", "overloaded_error")
        gone = await server.post(MESSAGES, ASKED)
        assert (gone.status_code, gone.json()["error"]["type"]) == (503, "overloaded_error")
