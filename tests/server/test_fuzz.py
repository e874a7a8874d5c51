"""Random bodies: whatever comes, the answer is the one that was asked for or one clear 4xx in the one shape."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fakes import EOS
from hamburger.server.bodies.chat import ChatBody
from hamburger.server.bodies.completion import CompletionBody
from hamburger.server.bodies.tokenizer import DetokenizeBody, TokenizeBody
from hamburger.server.messages.body import MessagesBody
from hamburger.server.responses.body import ResponsesBody
from serving import CHAT, COMPLETIONS, HELLO, error_of, events, serving, split

Send = Callable[[str, bytes | str], httpx.Response]
LENIENT = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def send() -> Iterator[Send]:
    """Posts bytes to one server; every answer of its engine is short."""
    loop = asyncio.new_event_loop()
    context = serving([*split("hello, world", 4, 3, 5), [EOS]])
    served = loop.run_until_complete(context.__aenter__())

    def post(path: str, body: bytes | str) -> httpx.Response:
        sent = served.client.post(path, content=body, headers={"Content-Type": "application/json"})
        return loop.run_until_complete(asyncio.wait_for(sent, 20))

    yield post
    loop.run_until_complete(context.__aexit__(None, None, None))
    for task in asyncio.all_tasks(loop):  # sse-starlette waits for the end of the process in one
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
# Values that a field takes, so that more than the first check of a body is reached.
LIKELY: dict[str, list[Any]] = {
    "messages": [
        HELLO, [{"role": "assistant", "content": "a"}], [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    ],
    "prompt": ["ab", ["a", "b"], [1, 2], [[1], [2, 3]], "", []],
    "stop": ["o", ["lo", "x"], [], ["a"] * 20],
    "stop_token_ids": [[111], [-1], [10**9]],
    "logit_bias": [{"5": 100}, {"5": -100}, {"-1": 0}, {"x": 1}],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "response_format": [
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}},
    ],
    "structured_outputs": [{"regex": "h.*"}, {"choice": ["hello"]}, {"grammar": "start: "}, {"json": "{}"}],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], []],
    "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "f"}},
                    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}],
    "chat_template_kwargs": [{}, {"messages": []}, {"add_generation_prompt": False}],
    "model": ["burger", "burger@0.5", "burger@2", "other"],
    "input": ["ab", HELLO, [{"type": "function_call_output", "call_id": "1", "output": "x"}], []],
    "text": [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"format": {"type": "xml"}}],
    "system": ["ab", [{"type": "text", "text": "ab"}]], "stop_sequences": [["lo"], [""]], "max_tokens": [1, 5, 0],
    "background": [False], "previous_response_id": [None, "resp_1"],
    "tokens": [[104, 105], [-1], [2**40], []],
}  # fmt: skip
SMALL = st.sampled_from([0, 1, 2, 0.5, 1.0])
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 20, 10**6, 2**31, 2**63, 0.0, 0.5, 1.0, -0.5, 1e308]) | st.booleans()


def likely(body: type[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Each field's name, and values that it may well take."""
    found: dict[str, st.SearchStrategy[Any]] = {}
    for name, field in body.model_fields.items():
        plain = st.booleans() if "bool" in str(field.annotation) else SMALL
        found[name] = st.sampled_from(LIKELY[name]) if name in LIKELY else plain
    return found | {name: st.none() | st.booleans() for name in body.refused}


def bodies(body: type[Any], **required: Any) -> st.SearchStrategy[dict[str, Any]]:
    good = likely(body)

    def field(name: str) -> st.SearchStrategy[tuple[str, Any]]:
        kinds = st.sampled_from([*[good[name]] * 12, NUMBERS, json_values])
        return st.tuples(st.just(name), kinds.flatmap(lambda kind: kind))

    fields = st.lists(st.sampled_from(sorted(good)).flatmap(field), max_size=6)
    return fields.map(lambda pairs: {**required, **dict(pairs)})


def check(send: Send, path: str, body: dict[str, Any]) -> None:
    answer = send(path, json.dumps(body))  # with NaN and Infinity, as Python clients write them
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.status_code != 422
        assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert body["stream"]
        if answer.text.startswith("event: "):
            assert re.search(r"\nevent: (message_stop|response\.(completed|incomplete))\n[^\n]*\n\n\Z", answer.text)
        else:
            assert events(answer.text)
    else:
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@LENIENT
@given(bodies(ChatBody, messages=HELLO))
@example({"messages": HELLO, "stream": True, "tools": LIKELY["tools"][0], "tool_choice": "auto"})
def test_chat(send: Send, body: dict[str, Any]) -> None:
    check(send, CHAT, body)


@LENIENT
@given(bodies(ResponsesBody, input="ab"))
def test_responses(send: Send, body: dict[str, Any]) -> None:
    check(send, "/v1/responses", body)


@LENIENT
@given(bodies(MessagesBody, messages=HELLO, max_tokens=5))
def test_messages(send: Send, body: dict[str, Any]) -> None:
    check(send, "/v1/messages", body)


@LENIENT
@given(bodies(CompletionBody, prompt="ab"))
def test_completions(send: Send, body: dict[str, Any]) -> None:
    check(send, COMPLETIONS, body)


@LENIENT
@given(st.sampled_from([("/tokenize", TokenizeBody, "prompt"), ("/detokenize", DetokenizeBody, "tokens")]), st.data())
def test_tokenize_and_detokenize(send: Send, endpoint: tuple[str, type[Any], str], data: st.DataObject) -> None:
    path, body, name = endpoint
    check(send, path, data.draw(bodies(body, **{name: LIKELY[name][0]})))


@LENIENT
@given(
    st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
    st.binary(max_size=40) | json_values.map(json.dumps),
)
def test_what_is_no_body(send: Send, path: str, body: bytes | str) -> None:
    answer = send(path, body)
    assert answer.status_code == 400, answer.text
    error_of(answer)
