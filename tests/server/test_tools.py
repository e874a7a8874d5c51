"""Tools over HTTP: what the model is told, forced and free calls, streamed and whole, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fakes import BOS, EOS, ByteTokenizer
from serving import CHAT, HELLO, Served, serving, split
from tools_asked import CALL, NOW, ROOM, WEATHER, allowed, told


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


@pytest.mark.parametrize("skip", [None, True])
async def test_a_special_token_that_begins_a_call_is_seen(monkeypatch: pytest.MonkeyPatch, skip: bool | None) -> None:
    monkeypatch.setattr("serving.ByteTokenizer", Hermes)
    monkeypatch.setattr("fake_engines.ByteTokenizer", Hermes)
    async with serving([[*b"Wait. ", BOS], [*CALL.encode()], [*b"</tool_call>", EOS]], **ROOM) as server:
        answer = await server.chat(tools=[WEATHER], skip_special_tokens=skip)
        chunks = await server.stream(CHAT, tools=[WEATHER], skip_special_tokens=skip)
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
        ({"messages": [{"role": "assistant", "content": None, "function_call": MADE["function"]}]}, "messages",
         "function_call is not supported by this server: use tool_calls"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ],
)  # fmt: skip
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused(shared: Served, fields: dict[str, Any], param: str, what: str) -> None:
    status, error = await shared.refused(CHAT, {"messages": HELLO, **fields})
    assert (status, error["param"]) == (400, param)
    assert what in error["message"]
