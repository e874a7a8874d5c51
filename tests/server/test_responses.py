"""/v1/responses: OpenAI's own client creates, streams, parses, goes on with, cancels and forgets responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from fakes import EOS
from gates import StepGate
from hamburger.server.api.errors import ApiError
from hamburger.server.config import SettingsError
from hamburger.server.responses.store import ResponseStore, Stored
from serving import MODEL, ByChoice, Served, error_of, on_port, serving, split, typed_events

TEXT = "Hello wörld"
HELLO = [*split(TEXT, 3, 4, 4, 1), [EOS]]
PARAMETERS = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
WEATHER: Any = {"type": "function", "name": "get_weather", "description": "w", "strict": True, "parameters": PARAMETERS}
NAMED: Any = {"type": "function", "name": "get_weather"}
CALL = '{"city": "Rom"}'
ROOM: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 1024}
RESPONSES = "/v1/responses"


class Answer(BaseModel):
    a: int


@asynccontextmanager
async def client(
    script: list[list[int]] = HELLO, api_key: str = "unused", **fields: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Served]]:
    async with (
        serving(script, **{**ROOM, **fields}) as server,
        on_port(server.app) as port,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=api_key, max_retries=0) as api,
    ):
        yield api, server


def prompt_of(server: Served) -> str:
    return bytes(server.runner.prompts[-1]).decode()


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
    for response in (whole, streamed):
        found = [(call["status"], call["arguments"]) for call in response["output"]]
        assert found == [("completed", CALL), ("incomplete", '{"ci')]
        assert response["status"] == "incomplete"


async def test_responses_are_stored_gone_on_with_and_forgotten() -> None:
    async with client() as (api, server):
        first = await api.responses.create(model=MODEL, input="Hi", instructions="Not for later.")
        second = await api.responses.create(model=MODEL, input="More", previous_response_id=first.id)
        assert prompt_of(server) == f"user: Hi\nassistant: {TEXT}\nuser: More\nassistant: "
        assert second.previous_response_id == first.id
        assert (await api.responses.retrieve(first.id)).to_dict() == first.to_dict()
        [item] = (await api.responses.input_items.list(first.id)).data
        assert item.to_dict()["content"] == [{"type": "input_text", "text": "Hi"}]
        await api.responses.delete(first.id)
        for work in (api.responses.retrieve(first.id), api.responses.delete(first.id)):
            with pytest.raises(openai.NotFoundError, match="not stored"):
                await work
        unstored = await api.responses.create(model=MODEL, input="Hi", store=False)
        with pytest.raises(openai.NotFoundError) as told:
            await api.responses.create(model=MODEL, input="Hi", previous_response_id=unstored.id)
        assert told.value.param == "previous_response_id"
        async with api.responses.stream(model=MODEL, input="Hi") as stream:
            streamed = await stream.get_final_response()
        assert (await api.responses.retrieve(streamed.id)).output_text == TEXT


async def test_input_items_come_in_pages_the_last_first() -> None:
    async with client() as (api, server):
        said = [str(number) for number in range(25)]
        asked: Any = [{"role": "user", "content": text} for text in said]
        response = await api.responses.create(model=MODEL, input=asked)

        async def listed(**query: Any) -> list[str]:
            pages = api.responses.input_items.list(response.id, **query)
            return [item.to_dict()["content"][0]["text"] async for item in pages]  # type: ignore[index]

        assert await listed() == said[::-1]
        assert await listed(order="asc", limit=7) == said
        page = await api.responses.input_items.list(response.id)
        assert (len(page.data), page.has_more) == (20, True)
        assert await listed(order="asc", after="item_22") == said[23:]
        for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "item_25"}, "after")):
            told = await server.client.get(f"{RESPONSES}/{response.id}/input_items", params=query)
            assert told.status_code == 400
            assert error_of(told)["param"] == param
        with pytest.raises(openai.BadRequestError, match="not streamed"):
            await api.responses.retrieve(response.id, stream=True)
        assert (await api.responses.retrieve(response.id, stream=False)).id == response.id


async def test_a_response_is_its_own_clients_only() -> None:
    async with client(api_key="one", settings={"api_key": "one,two"}) as (api, _):
        mine = await api.responses.create(model=MODEL, input="Hi")
        other = api.with_options(api_key="two")
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(mine.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=MODEL, input="Hi", previous_response_id=mine.id)


async def test_one_in_the_background_ends_by_itself_or_when_it_is_cancelled() -> None:
    gate = StepGate()
    async with client(runner=ByChoice(HELLO, gate=gate)) as (api, _):
        waiting = await api.responses.create(model=MODEL, input="Hi", background=True)
        assert waiting.status == "in_progress"
        assert (await api.responses.retrieve(waiting.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="still being written"):
            await api.responses.create(model=MODEL, input="Hi", previous_response_id=waiting.id)
        given_up = await api.responses.create(model=MODEL, input="Hi", background=True)
        deleted = await api.responses.create(model=MODEL, input="Hi", background=True)
        cancelled = await api.responses.cancel(given_up.id)
        assert (cancelled.status, cancelled.output) == ("cancelled", [])
        await api.responses.delete(deleted.id)
        gate.set()
        async with asyncio.timeout(10):
            while (found := await api.responses.retrieve(waiting.id)).status == "in_progress":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (found.status, found.output_text) == ("completed", TEXT)
        assert (await api.responses.cancel(waiting.id)).status == "completed"  # too late
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(deleted.id)
        foreground = await api.responses.create(model=MODEL, input="Hi")
        with pytest.raises(openai.BadRequestError, match="in the background"):
            await api.responses.cancel(foreground.id)


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
        ({"reasoning": {"effort": "high"}}, "reasoning", "reads neither"),
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
async def test_what_is_refused_names_its_field(fields: dict[str, Any], param: str, told: str) -> None:
    async with serving(HELLO, **ROOM) as server:
        status, error = await server.refused(RESPONSES, {"input": "Hi", **fields})
        assert (status, error["param"]) == (400, param)
        assert told in error["message"]
        assert server.runner.num_steps == 0


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


async def test_one_in_the_background_may_fail() -> None:
    async with serving(runner=ByChoice(HELLO, fail_at_step=3), **ROOM) as server:
        started = await server.ok(RESPONSES, {"input": "Hi", "background": True})
        async with asyncio.timeout(10):
            found = started
            while found["status"] == "in_progress":
                await asyncio.sleep(0.01)
                found = (await server.client.get(f"{RESPONSES}/{started['id']}")).json()
        assert (found["status"], found["output"]) == ("failed", [])


async def test_a_fault_of_ours_in_the_background_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr("hamburger.server.completions.openai_reply.OpenAIReply.add", broken)
    async with serving(HELLO, **ROOM) as server:
        started = await server.ok(RESPONSES, {"input": "Hi", "background": True})
        async with asyncio.timeout(10):
            found = started
            while found["status"] == "in_progress":
                await asyncio.sleep(0.01)
                found = (await server.client.get(f"{RESPONSES}/{started['id']}")).json()
    assert found["status"] == "failed"
    assert "secret" not in found["error"]["message"]


def stored(name: str, size: int = 0, key: str = "", **fields: Any) -> Stored:
    return Stored({"id": name, "x": "a" * size}, [], [], key=key, **fields)


def test_a_file_keeps_them_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    store = ResponseStore(1000, path)
    store.put(stored("a", 100, key="secret-key"))
    store.put(stored("running", cancel=lambda: None))
    with pytest.raises(SettingsError, match="response_file"):
        ResponseStore(1000, path)  # another server's
    store.close()
    assert b"secret-key" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    store = ResponseStore(1000, path)
    assert store.get("a", "secret-key").response == {"id": "a", "x": "a" * 100}
    with pytest.raises(ApiError):
        store.get("a", "another key")
    broken = store.get("running", "")
    assert (broken.response["status"], broken.response["error"]["code"]) == ("failed", "server_error")
    assert broken.cancel is None
    for number in range(3):
        store.put(stored(f"r{number}", 300))
    assert ("a" in store, "r2" in store) == (False, True)  # its bound counts what was there
    store.close()
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"no database" * 100)
    for wrong in (path, tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(SettingsError, match="response_file"):
            ResponseStore(1000, wrong)


async def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = {"response_file": tmp_path / "responses"}
    async with serving([[*b"hello"], [EOS]], settings=settings) as server:
        first = await server.ok(RESPONSES, {"input": "hi"})
    async with serving([[*b"again"], [EOS]], settings=settings) as server:
        assert (await server.client.get(f"{RESPONSES}/{first['id']}")).json() == first
        await server.ok(RESPONSES, {"input": "more", "previous_response_id": first["id"]})
        assert b"hello" in bytes(server.runner.prompts[-1])


def test_the_oldest_make_room_but_for_those_that_are_written() -> None:
    store = ResponseStore(1000)
    store.put(stored("running", 300, cancel=lambda: None))
    for number in range(5):
        store.put(stored(f"r{number}", 300))
    assert [name in store for name in ("running", "r2", "r3", "r4")] == [True, False, True, True]
    store.put(stored("r4", 10))  # in its own place
    store.put(stored("small"))
    assert len(store) == 4
    store.put(stored("too large", 2000))
    assert "too large" not in store
    assert len(store) == 4
    for name in ("running", "r3", "r4", "small"):
        store.delete(name, "")
    with pytest.raises(ApiError):
        store.get("r4", "")
    store.put(stored("r9", 900))  # all of the room is there again
    assert "r9" in store


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
