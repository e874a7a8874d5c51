"""Structured output and tools through the official OpenAI client, on the embedded model."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, Field

from real_server import RealServer

EMBEDDED = "smollm2-135m-hamburger"


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    likes: list[Literal["music", "sport", "books"]] = Field(max_length=3)


class Reply(BaseModel):
    answer: str = Field(max_length=60)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=7)


QUESTION: Any = [{"role": "user", "content": "Anna is 34 years old and likes books and sport. Write this as JSON."}]
WEATHER: Any = [{"role": "user", "content": "What will the weather be in Rome in the next 3 days?"}]


@pytest.mark.parametrize("confidence", [0.3, 0.8, 1.0])
def test_parse_gives_the_model_that_was_asked(embedded: RealServer, confidence: float) -> None:
    answer = embedded.client.chat.completions.parse(
        model=f"{EMBEDDED}@{confidence}", messages=QUESTION, response_format=Person, temperature=0, max_tokens=200
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)


def test_the_streaming_helper_parses_too(embedded: RealServer) -> None:
    with embedded.client.chat.completions.stream(
        model=EMBEDDED, messages=QUESTION, response_format=Person, temperature=0, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Person)


def test_required_and_named_tools(embedded: RealServer) -> None:
    tools: Any = [pydantic_function_tool(GetWeather)]
    named: Any = {"type": "function", "function": {"name": "GetWeather"}}
    wanted: list[tuple[Any, str]] = [("required", "tool_calls"), (named, "stop")]
    for choice, reason in wanted:
        # So small a model calls again and again where it may.
        answer = embedded.client.chat.completions.create(
            model=EMBEDDED,
            messages=WEATHER,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
        )
        assert answer.choices[0].finish_reason == reason
        assert answer.choices[0].message.tool_calls
        for call in answer.choices[0].message.tool_calls:
            assert call.type == "function"
            GetWeather.model_validate_json(call.function.arguments)


def test_the_streaming_helper_puts_calls_together(embedded: RealServer) -> None:
    with embedded.client.chat.completions.stream(
        model=EMBEDDED,
        messages=WEATHER,
        tools=[pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    [event] = done
    assert event.name == "GetWeather"
    GetWeather.model_validate(json.loads(event.arguments))


def test_tools_and_a_format_together(embedded: RealServer) -> None:
    asks = {
        "tool_calls": 'Call GetWeather for Rome, 3 days. Answer with {"name": "GetWeather", "arguments": ...}',
        "stop": 'What is 2 and 2? Answer with JSON of the form {"answer": "..."}.',
    }
    for reason, content in asks.items():
        asked: dict[str, Any] = {
            "model": EMBEDDED, "messages": [{"role": "user", "content": content}], "response_format": Reply,
            "tools": [pydantic_function_tool(GetWeather)], "temperature": 0, "max_tokens": 200,
        }  # fmt: skip
        whole = embedded.client.chat.completions.parse(**asked)
        with embedded.client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()
        for answer in (whole, streamed):
            [choice] = answer.choices
            assert choice.finish_reason == reason
            if reason == "stop":
                assert isinstance(choice.message.parsed, Reply)
            else:
                [call] = choice.message.tool_calls or []
                assert isinstance(call.function.parsed_arguments, GetWeather)
        assert whole.choices[0].message.content == streamed.choices[0].message.content


def test_a_call_and_its_result_go_back_in(embedded: RealServer) -> None:
    call: Any = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "GetWeather", "arguments": '{"city": "Rome", "days": 1}'},
    }
    messages: Any = [
        *WEATHER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    raw = embedded.client.chat.completions.with_raw_response.create(
        model=EMBEDDED, messages=messages, tools=[pydantic_function_tool(GetWeather)], temperature=0, max_tokens=16
    )
    assert raw.status_code == 200
    assert raw.parse().usage is not None


def test_the_last_message_is_continued(embedded: RealServer) -> None:
    messages: Any = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    answer = embedded.client.chat.completions.create(
        model=f"{EMBEDDED}@1.0",
        messages=messages,
        temperature=0,
        max_tokens=4,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert (answer.choices[0].message.content or "").startswith(" Paris")
