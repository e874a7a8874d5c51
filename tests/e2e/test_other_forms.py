"""The same answer in each API's form, from a real server: chat completions, responses, messages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from real_server import RealServer

QUESTIONS = ["Name the capital of France.", "Count to five.", "What is a river?", "Say hello in German."]
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def body(path: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    if path == "/v1/responses":
        return {"input": question, "max_output_tokens": 40, "temperature": 0, **fields}
    return {"messages": messages, "max_tokens": 40, "temperature": 0, **fields}


def text_of(path: str, answer: dict[str, Any]) -> str:
    match path:
        case "/v1/responses":
            return str(answer["output"][0]["content"][0]["text"])
        case "/v1/messages":
            return str(answer["content"][0]["text"])
    return str(answer["choices"][0]["message"]["content"])


def streamed_text(path: str, text: str) -> str:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    match path:
        case "/v1/responses":
            return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        case "/v1/messages":
            return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


async def test_all_forms_say_the_same_many_at_once(embedded: RealServer) -> None:
    async with httpx.AsyncClient(base_url=embedded.url, timeout=60) as http:
        alone = {}
        for question in QUESTIONS:
            response = await http.post(PATHS[0], json=body(PATHS[0], question))
            alone[question] = text_of(PATHS[0], response.json())

        async def ask(path: str, question: str, stream: bool) -> None:
            response = await http.post(path, json=body(path, question, stream=stream))
            assert response.status_code == 200, response.text
            found = streamed_text(path, response.text) if stream else text_of(path, response.json())
            assert found == alone[question]

        asked = [(path, question, stream) for path in PATHS for question in QUESTIONS for stream in (False, True)]
        await asyncio.gather(*(ask(*one) for one in asked))
    assert all(alone.values())
    embedded.wait_idle()


async def test_a_client_that_leaves_a_typed_stream_frees_its_slots(embedded: RealServer) -> None:
    async with httpx.AsyncClient(base_url=embedded.url, timeout=60) as http:
        for path, limit in (("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens")):
            asked = body(path, "Tell me a long story.", stream=True, **{limit: 400})
            async with http.stream("POST", path, json=asked) as response:
                async for _ in response.aiter_lines():
                    break
            embedded.wait_idle()
            assert embedded.metric("hamburger_kv_cache_usage_perc") == 0


async def test_a_conversation_goes_on_from_the_prefix_cache(embedded: RealServer) -> None:
    async with httpx.AsyncClient(base_url=embedded.url, timeout=60) as http:
        first = (await http.post("/v1/responses", json=body("/v1/responses", "Tell me of the sea. " * 8))).json()
        further = body("/v1/responses", "Go on.", previous_response_id=first["id"])
        second = (await http.post("/v1/responses", json=further)).json()
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= 32
