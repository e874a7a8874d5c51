"""What programs too large to install here send: tests/data/interop/recorded.json, as docs/clients.md tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from client_programs import ROOT
from real_server import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]
MODEL = "smollm2-135m-hamburger"
RECORDED = json.loads((ROOT / "tests/data/interop/recorded.json").read_text(encoding="utf-8"))
CALLS = [
    pytest.param(
        call | {"headers": client["headers"] | call.get("headers", {})}, id=f"{client['client']}: {call['name']}"
    )
    for client in RECORDED
    for call in client["calls"]
]


@pytest.fixture(scope="module")
def roomy() -> Iterator[RealServer]:
    """The embedded default, with room for the 1000 tokens that a title may have."""
    with RealServer("--max-model-len", "2048", "--kv-cache-memory", "512MiB") as server:
        yield server


@pytest.mark.parametrize("call", CALLS)
def test_a_recorded_call_is_answered_as_its_client_reads_it(roomy: RealServer, call: dict[str, Any]) -> None:
    response = httpx.request(
        call.get("method", "POST"),
        roomy.url + call["path"],
        json=call.get("body"),
        headers={**call["headers"], "Authorization": "Bearer none"},
        timeout=120,
    )
    assert response.status_code == (404 if call["wants"] == "404" else 200), response.text
    match call["wants"]:
        case "models":
            [model] = response.json()["data"]
            assert response.json()["object"] == "list"
            assert (model["id"], model["object"]) == (MODEL, "model")
            assert isinstance(model["created"], int)
        case "tokens":
            assert len(response.json()["tokens"]) == response.json()["count"] > 1
        case "metrics":
            assert "# TYPE hamburger_" in response.text
        case "404":
            assert response.json()["error"]["message"].startswith("There is nothing at /v1/embeddings. Served are ")
        case "text":
            assert text_of(response) != ""
        case "title":
            assert json.loads(text_of(response)).keys() == {"language", "title"}
        case "stream":
            text, _ = streamed(response.text, call["body"])
            assert "Paris" in text
        case "16 tokens":
            text, usage = streamed(response.text, call["body"])
            assert text != ""
            assert usage["completion_tokens"] == 16
        case other:
            raise AssertionError(f"recorded.json wants {other!r}")


def text_of(response: httpx.Response) -> str:
    [choice] = response.json()["choices"]
    assert response.json()["usage"]["completion_tokens"] > 0
    assert (choice["message"]["role"], choice["finish_reason"]) in (("assistant", "stop"), ("assistant", "length"))
    text: str = choice["message"]["content"]
    return text


def streamed(events: str, body: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """The text and the usage of a stream: each event a line of JSON, an end with a reason, the usage by itself."""
    *told, end, rest = events.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in told]
    usage = {}
    if body.get("stream_options"):
        last = chunks.pop()
        assert last["choices"] == []
        usage = last["usage"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] in ("stop", "length")
    if "messages" in body:
        assert choices[0]["delta"]["role"] == "assistant"
        return "".join(choice["delta"].get("content") or "" for choice in choices), usage
    return "".join(choice["text"] for choice in choices), usage
