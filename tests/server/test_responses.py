"""/v1/responses: OpenAI's own client creates, streams and parses responses; what is refused, and what fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from fakes import EOS, ByteTokenizer
from responses_api import HELLO, RESPONSES, ROOM, TEXT, client, prompt_of
from serving import MODEL, ByChoice, Served, error_of, serving, split, typed_events

PARAMETERS = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "w", "strict": True, "parameters": PARAMETERS}
NAMED: Any = {"type": "function", "name": "get_weather"}
CALL = '{"city": "Rom"}'


class Answer(BaseModel):
    a: int


async def test_a_whole_response() -> None:
    async with client() as (api, server):
        response = await api.responses.create(
            model=MODEL, input="Hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
        )
        assert prompt_of(server) == "system: Be brief.\nuser: Hi\nassistant: "
    assert (response.object, response.status, response.output_text) == ("response", "completed", TEXT)
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens == 38 + 13
    assert response.usage.to_dict()["macro_steps"] == 5
    assert response.incomplete_details is None


async def test_one_that_is_cut_is_incomplete() -> None:
    async with client() as (api, _):
        response = await api.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "Hel"
    assert response.output[0].to_dict()["status"] == "incomplete"


async def test_an_end_may_be_ignored() -> None:
    """Load generators ask for it, to get as many tokens as they want."""
    async with client([[104], [EOS], [105], [106]]) as (api, _):
        asked: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 4}
        ends = await api.responses.create(**asked)
        goes_on = await api.responses.create(**asked, extra_body={"ignore_eos": True})
    assert [(response.status, response.output_text) for response in (ends, goes_on)] == [
        ("completed", "h"),
        ("incomplete", "hij"),
    ]


async def test_a_stream_is_typed_numbered_and_whole() -> None:
    async with client() as (api, server):
        whole = await api.responses.create(model=MODEL, input="Hi", include=["message.output_text.logprobs"])
        async with api.responses.stream(model=MODEL, input="Hi", include=["message.output_text.logprobs"]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        raw = await server.client.post(RESPONSES, json={"input": "Hi", "stream": True})
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert types[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    assert set(types[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert final.output_text == TEXT
    part, streamed = whole.output[0].to_dict(), final.output[0].to_dict()
    assert part["content"][0]["logprobs"] == streamed["content"][0]["logprobs"]  # type: ignore[index]
    assert len(part["content"][0]["logprobs"]) == 13  # type: ignore[index]
    assert "data: [DONE]" not in raw.text


async def test_a_response_may_be_parsed() -> None:
    async with client([*split('{"a": 1}', 5, 3), [EOS]]) as (api, _):
        parsed = await api.responses.parse(model=MODEL, input="Hi", text_format=Answer)
    assert parsed.output_parsed == Answer(a=1)


async def test_with_tools_it_is_parsed_or_calls_one_that_is_allowed() -> None:
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
    asked: Any = {
        "model": MODEL,
        "input": "Hi",
        "tools": [WEATHER, {**WEATHER, "name": "other"}],
        "text_format": Answer,
    }
    call = f'{{"name": "get_weather", "arguments": {CALL}}}'
    for text in ('{"a": 1}', call):
        async with client([*split(text, 5, len(text) - 5), [EOS]]) as (api, server):
            parsed = await api.responses.parse(**asked, tool_choice=allowed)
            assert '"name": "other"' in prompt_of(server)
            async with api.responses.stream(**asked) as stream:
                streamed = await stream.get_final_response()
        assert parsed.to_dict()["tool_choice"] == allowed
        for response in (parsed, streamed):
            [item] = response.output
            assert (item.type, response.output_parsed) == (
                ("message", Answer(a=1)) if text != call else ("function_call", None)
            )
    async with client([[*call.replace("get_weather", "other").encode()], [EOS]]) as (api, _):
        with pytest.raises(openai.BadRequestError, match="grammar"):
            await api.responses.parse(**asked, tool_choice=allowed)


async def test_calls_and_what_they_gave() -> None:
    script = [*split(CALL, 5, 5, len(CALL) - 10), [EOS]]
    async with client(script) as (api, server):
        first = await api.responses.create(model=MODEL, input="Hi", tools=[WEATHER], tool_choice=NAMED)
        [call] = first.output
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("get_weather", CALL)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        await api.responses.create(model=MODEL, input=[result], previous_response_id=first.id, tools=[WEATHER])
        said = '{"name": "get_weather", "arguments": {"city": "Rom"}}'
        assert prompt_of(server).endswith(f"user: Hi\nassistant: [{said}]\ntool: sunny\nassistant: ")
        given: Any = [{"role": "user", "content": "Hi"}, call.to_dict(), result]
        await api.responses.create(model=MODEL, input=given, tools=[WEATHER])
        assert prompt_of(server).endswith(f"user: Hi\nassistant: [{said}]\ntool: sunny\nassistant: ")
        async with api.responses.stream(model=MODEL, input="Hi", tools=[WEATHER], tool_choice=NAMED) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == CALL
    assert len(deltas) == 3
    assert final.output[0].to_dict()["arguments"] == CALL
    assert events[-3].type == "response.function_call_arguments.done"


async def test_of_several_calls_only_the_last_one_is_cut() -> None:
    """Also in a whole answer: a call that is there from beginning to end may be carried out."""
    calls = f'[{{"name": "get_weather", "arguments": {CALL}}}, {{"name": "get_weather", "arguments": {{"ci'
    async with client(split(calls, *[5] * 20)) as (_, server):
        tool = {**WEATHER, "strict": False}
        asked: Any = {"model": MODEL, "input": "Hi", "tools": [tool], "max_output_tokens": len(calls)}
        whole = (await server.post(RESPONSES, asked)).json()
        streamed = typed_events((await server.post(RESPONSES, {**asked, "stream": True})).text)[-1]["response"]
        again = await server.post(RESPONSES, {"input": "Go on.", "previous_response_id": whole["id"]})
        assert again.status_code == 200, again.text
    for response in (whole, streamed):
        found = [(call["status"], call["arguments"]) for call in response["output"]]
        assert found == [("completed", CALL), ("incomplete", '{"ci')]
        assert response["status"] == "incomplete"


@pytest.mark.parametrize("cut", [40, 47, 52, 53])
async def test_text_behind_a_call_is_told_behind_its_arguments(cut: int) -> None:
    """Also where one group has the end of them and its beginning."""
    text = f'{{"name": "get_weather", "arguments": {CALL}}} Done.'
    async with client([*split(text, cut, len(text) - cut), [EOS]]) as (_, server):
        asked: Any = {"model": MODEL, "input": "Hi", "tools": [{**WEATHER, "strict": False}], "stream": True}
        told = typed_events((await server.post(RESPONSES, asked)).text)
    call, message = told[-1]["response"]["output"]
    assert (call["name"], call["arguments"], message["content"][0]["text"]) == ("get_weather", CALL, "Done.")
    for item, kind in ((call, "function_call_arguments"), (message, "output_text")):
        deltas = [event for event in told if event["type"] == f"response.{kind}.delta"]
        assert "".join(event["delta"] for event in deltas) == (CALL if item is call else "Done.")
        assert {event["item_id"] for event in deltas} == {item["id"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[Served]:
    async with serving(HELLO, **ROOM) as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"background": True, "store": False}, "background", "store is false"),
        ({"background": True, "stream": True}, "stream", "not streamed"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"max_tool_calls": 1}, "max_tool_calls", "server"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "maximum context length is 2048"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "and max_output_tokens is 5000"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "lower max_output_tokens to"),
        ({"max_output_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens is 4, but max_output_tokens is 3"),
        ({"input": "a" * 3000}, "input", "maximum context length is 2048"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no tools"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "reads neither 'reasoning_effort' nor"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}}, "text", "Invalid type"),
        ({"temperature": -1.0}, "temperature", "temperature"),
        ({"include": ["file_search_call.results"]}, "include", "output_text"),
        ({"top_logprobs": 50}, "top_logprobs", "top_logprobs"),
        ({"n": 2}, "n", "one answer at a time"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"logprobs": True}, "logprobs", "top_logprobs"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"structured_outputs": {"json": {}}, "guided_regex": "a"}, "guided_regex", "either"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused_names_its_field(refusing: Served, fields: dict[str, Any], param: str, told: str) -> None:
    status, error = await refusing.refused(RESPONSES, {"input": "Hi", **fields})
    assert (status, error["param"]) == (400, param)
    assert told in error["message"]
    assert refusing.runner.num_steps == 0


async def test_an_engine_that_dies_fails_the_stream() -> None:
    async with serving(runner=ByChoice(HELLO, fail_at_step=3), **ROOM) as server:
        raw = (await server.client.post(RESPONSES, json={"input": "Hi", "stream": True})).text
        told = typed_events(raw)
        assert [event["type"] for event in told[-2:]] == ["error", "response.failed"]
        assert told[-2]["code"] == "engine_unavailable"
        failed = told[-1]["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        heard = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
        [item] = failed["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", heard)
        assert heard == "Hello w"
        assert (await server.client.get(f"{RESPONSES}/{failed['id']}")).json() == failed
        response = await server.client.post(RESPONSES, json={"input": "Hi"})
        assert response.status_code == 503
        error_of(response)


async def test_logprobs_are_those_of_the_text_alone() -> None:
    class Thinker(ByteTokenizer):
        loader = ByteTokenizer().loader  # other processes know no tests
        chat_template = tool_template = "{{ messages }} <think> </think> <tool_call>"

    call = f'<tool_call>{{"name": "get_weather", "arguments": {CALL}}}</tool_call>'
    asked: Any = {"model": MODEL, "input": "Hi", "tools": [WEATHER], "include": ["message.output_text.logprobs"]}
    for text, behind in (("Suné 🧀.", ""), ("Sun é.", f" {call}"), ("", call)):
        written = f"<think>\nHm, Sun.\n</think>\n\n{text}{behind}".encode()
        for size in (1, 7, len(written)):
            script = [[*written[i : i + size]] for i in range(0, len(written), size)]
            async with client([*script, [EOS]], tokenizer=Thinker(), max_group=100) as (api, _):
                whole = await api.responses.create(**asked)
                async with api.responses.stream(**asked) as stream:
                    deltas = [event async for event in stream if event.type == "response.output_text.delta"]
                    streamed = await stream.get_final_response()
            told: Any = [entry.to_dict()["bytes"] for event in deltas for entry in event.logprobs]
            assert b"".join(map(bytes, told)).decode() == text
            for response in (whole, streamed):
                output: Any = response.to_dict()["output"]
                entries = [item["content"][0]["logprobs"] for item in output if item["type"] == "message"]
                tokens = b"".join(bytes(entry["bytes"]) for of_item in entries for entry in of_item)
                assert tokens.decode() == text + ("" if behind else "<eos>")


async def test_what_shapes_an_answer_is_taken_as_in_a_chat() -> None:
    async with client([[104], [105], [106]]) as (api, _):
        asked: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 3}
        response = await api.responses.create(**asked, extra_body={"stop": "i", "ignore_eos": True})
        assert response.output_text == "h"
        with pytest.raises(openai.BadRequestError, match="min_p is 2") as error:
            await api.responses.create(**asked, extra_body={"min_p": 2})
    assert error.value.param == "min_p"


async def test_a_grammar_is_kept_to() -> None:
    async with client([[*b"yes and more"], [EOS]], max_group=20) as (api, _):
        response = await api.responses.create(model=MODEL, input="Hi", extra_body={"guided_choice": ["yes", "no"]})
    assert response.output_text == "yes"
