"""Fields of one endpoint that another one does not have are refused by name there, and the remedy is told."""

from __future__ import annotations

from typing import Any

import pytest

from hamburger.server.api.prompts import MAX_TOKENIZED
from serving import CHAT, COMPLETIONS, HELLO, serving

RESPONSES, MESSAGES, TOKENIZE = "/v1/responses", "/v1/messages", "/tokenize"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "ab"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HELLO, "max_tokens": 2},
    TOKENIZE: {"messages": HELLO},
}
TOOL = {"type": "function", "function": {"name": "f"}}
JSON = {"format": {"type": "json_object"}}
FIELDS: list[tuple[str, str, Any, str]] = [
    *[(CHAT, name, value, remedy) for name, value, remedy in (
        ("max_output_tokens", 3, "use max_tokens"), ("stop_sequences", ["a"], "use stop"), ("best_of", 3, "use n"),
        ("suffix", "a", "leave it out"), ("prompt", "a", "use messages"), ("input", "a", "use messages"),
        ("instructions", "a", "use a system message"), ("system", "a", "use a system message"),
        ("previous_response_id", "resp_1", "use responses"), ("text", JSON, "use response_format"),
        ("truncation", "auto", "use truncate_prompt_tokens"),
    )],
    *[(COMPLETIONS, name, value, remedy) for name, value, remedy in (
        ("tools", [TOOL], "use chat completions"), ("tool_choice", "required", "use chat completions"),
        ("top_logprobs", 2, "use logprobs"), ("messages", HELLO, "use chat completions"),
        ("reasoning_effort", "low", "use chat completions"), ("chat_template_kwargs", {"a": 1}, "use chat completions"),
        ("max_output_tokens", 3, "use max_tokens"), ("input", "a", "use prompt"),
    )],
    *[(RESPONSES, name, value, remedy) for name, value, remedy in (
        ("stop_sequences", ["a"], "use stop"), ("best_of", 3, "one answer at a time"),
        ("suffix", "a", "leave it out"), ("system", "a", "use instructions"), ("n_predict", 3, "use max_output_tokens"),
        ("n_probs", 3, "use top_logprobs"), ("return_prompt_token_ids", True, "use chat completions"),
        ("background_options", {"a": 1}, "leave it out"),
    )],
    *[(MESSAGES, name, value, remedy) for name, value, remedy in (
        ("max_output_tokens", 3, "use max_tokens"), ("best_of", 3, "one answer at a time"),
        ("suffix", "a", "leave it out"), ("stop_regex", "a", "use stop_sequences"),
        ("min_new_tokens", 3, "use chat completions or responses"), ("thinking_budget_tokens", 3, "use thinking"),
        ("instructions", "a", "use system"), ("input", "a", "use messages"), ("prompt", "a", "use messages"),
        ("text", JSON, "use output_config.format"),
    )],
    *[(TOKENIZE, name, value, remedy) for name, value, remedy in (
        ("chat_template", "{{ 1 }}", "--chat-template"), ("documents", [{"a": "b"}], "put them into the messages"),
        ("functions", [{"name": "f"}], "use tools"), ("truncate_prompt_tokens", 3, "all of the prompt is counted"),
    )],
]  # fmt: skip


async def test_a_field_of_another_endpoint_is_refused_by_name() -> None:
    async with serving([[97]]) as server:
        for path, name, value, remedy in FIELDS:
            told = await server.post(path, {**BODIES[path], name: value})
            message = told.json()["error"]["message"]
            assert told.status_code == 400, (path, name)
            assert name in message
            assert remedy in message


async def test_values_that_ask_for_nothing_pass() -> None:
    harmless: dict[str, dict[str, Any]] = {
        CHAT: {"best_of": 1, "stop_sequences": [], "text": {"format": {"type": "text"}}, "truncation": "disabled"},
        COMPLETIONS: {"tools": [], "tool_choice": "auto", "top_logprobs": 0, "reasoning_effort": "none"},
        RESPONSES: {"best_of": 1, "suffix": None},
        MESSAGES: {"best_of": 1, "text": {}, "input": None},
        TOKENIZE: {"documents": [], "truncate_prompt_tokens": None},
    }
    async with serving([[97]]) as server:
        for path, fields in harmless.items():
            assert (await server.post(path, {**BODIES[path], **fields})).status_code == 200, path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structural_tag", "{}"),
        ("whitespace_pattern", " ?"),
        ("disable_additional_properties", True),
    ],
)
async def test_parts_of_structured_outputs_that_are_not_served(field: str, value: Any) -> None:
    async with serving([[*b"{}"]]) as server:
        ways: list[dict[str, Any]] = [{}, {"json": {}}]
        for others in ways:
            status, error = await server.refused(
                CHAT, {"messages": HELLO, "structured_outputs": {**others, field: value}}
            )
            assert (status, error["param"]) == (400, "structured_outputs")
            assert f"{field} is not supported" in error["message"]
        fields = {"json_object": True, field: None, "disable_fallback": True}
        assert (await server.chat(structured_outputs=fields))["choices"][0]["message"]["content"] == "{}"


@pytest.mark.parametrize(
    ("path", "fields", "param", "part"),
    [
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "json_schema needs schema"),
        (RESPONSES, {"text": {"format": {"type": "text", "schema": {}}}}, "text", "and no other"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, "messages", "a part is an object with a type"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}},
            "response_format",
            "response_format.json_schema.schema: it must be a JSON Schema: an object, true or false",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_object", "schema": {"$ref": "#"}}},
            "response_format",
            "nothing can be written by it",
        ),
        (TOKENIZE, {"messages": []}, "messages", "at least 1 item"),
        (COMPLETIONS, {"prompt": "a" * 257, "echo": True, "max_tokens": 0}, "prompt", "257: shorten the prompt"),
        (COMPLETIONS, {"prompt": "a" * 256, "max_tokens": 1}, "prompt", "at least one must be left for the answer"),
    ],
)
async def test_errors_name_the_field_that_is_at_fault(path: str, fields: dict[str, Any], param: str, part: str) -> None:
    async with serving([[97]], max_model_len=256) as server:
        told = await server.post(
            path,
            {**BODIES[path], "add_special_tokens": False, **fields}
            if path == COMPLETIONS
            else {**BODIES[path], **fields},
        )
        error = told.json()["error"]
        assert (told.status_code, error["param"]) == (400, param)
        assert part in error["message"]


async def test_a_response_s_prompt_is_counted() -> None:
    async with serving([[97], [98]]) as server:
        asked = {"input": "Hi", "instructions": "Be brief."}
        counted = await server.ok("/v1/responses/input_tokens", asked)
        first = await server.ok(RESPONSES, {**asked, "max_output_tokens": 1})
        assert counted == {"object": "response.input_tokens", "input_tokens": first["usage"]["input_tokens"]}
        more = {"input": "And?", "previous_response_id": first["id"]}
        counted = await server.ok("/v1/responses/input_tokens", more)
        second = await server.ok(RESPONSES, {**more, "max_output_tokens": 1})
        assert counted["input_tokens"] == second["usage"]["input_tokens"]
        # Of what is too long it is told how long it is.
        assert (await server.ok("/v1/responses/input_tokens", {"input": "a" * 9000}))["input_tokens"] > 9000
        told = await server.post("/v1/responses/input_tokens", {"input": "a" * MAX_TOKENIZED})
        error = told.json()["error"]
        assert (told.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
        assert "at most 1,000,000 are counted: shorten it" in error["message"]


@pytest.mark.parametrize(("groups", "how"), [("composed", "groups verified, and settle on"), ("verified", "settle on")])
async def test_settle_says_how_its_engine_must_be_started(groups: Any, how: str) -> None:
    async with serving([[97]], groups=groups) as server:
        status, error = await server.refused(CHAT, {"messages": HELLO, "settle": True})
    assert (status, error["param"]) == (400, "settle")
    assert f"it must be started with {how}." in error["message"]
