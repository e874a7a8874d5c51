"""Packages and commands that speak to models, from LangChain to curl, as their users call them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from client_programs import Clients
from real_server import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]
MODEL = "smollm2-135m-hamburger"


def test_langchain(clients: Clients, burger: RealServer, composed: RealServer) -> None:
    found = clients.program("langchain_chat.py", f"{burger.url}/v1", MODEL, f"{composed.url}/v1")
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    assert found["pieces"] > 1
    assert found["tokens_per_kv"]["0.3"] > found["tokens_per_kv"]["1.0"] == 1
    assert found["usage"]["output_tokens"] == found["streamed_usage"]["output_tokens"] > 0
    assert "Paris" in found["batch"][0]
    assert len(found["batch"]) == 8
    assert found["structured"].keys() == {"name", "year"}
    assert isinstance(found["structured"]["year"], int)
    assert set(found["tool_calls"]) == {"weather"}
    assert found["logprobs"] == found["usage"]["output_tokens"]


def test_llama_index(clients: Clients, burger: RealServer) -> None:
    found = clients.program("llama_index_chat.py", f"{burger.url}/v1", MODEL)
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    assert found["asynchronous"] == [found["text"]] * 4
    assert found["pieces"] > 1
    assert found["usage"] > 0
    assert found["completion"] == found["completion_streamed"] != ""
    assert found["calls"] == [["weather", ["city"]]]
    assert len(found["ships"]) == 2  # by a tool, by a JSON Schema
    for ship in found["ships"]:
        assert ship.keys() == {"name", "year"}
        assert 1000 <= ship["year"] <= 2100


def test_dspy(clients: Clients, burger: RealServer) -> None:
    found = clients.program("dspy_modules.py", f"{burger.url}/v1", MODEL)
    assert "Paris" in found["text"]
    assert found["asynchronous"] == [found["text"]] * 4
    assert found["known"] == found["text"]
    assert 0 < found["usage"]["completion_tokens"] < found["usage"]["prompt_tokens"]
    assert found["kind"] in ("animal", "plant", "city")
    # DSPy cuts what it streams by our pieces, and may leave what stood before the value.
    assert "".join(found["streamed"]).strip(' "') == found["kind"]
    [[tool, arguments]] = found["calls"]
    assert tool == "weather"
    assert "Oslo" in str(arguments) or "Rome" in str(arguments)
    assert found["unknown"].startswith("LMUnsupportedModelError")
    assert "other" in found["unknown"]
    assert "maximum context length is 1024 tokens" in found["too_long"]


def test_litellm(clients: Clients, burger: RealServer) -> None:
    found = clients.program("litellm_chat.py", f"{burger.url}/v1", MODEL)
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    assert found["asynchronous"] == [found["text"]] * 4
    assert found["completion"]
    assert found["refused"].startswith("NotFoundError")
    assert "other" in found["refused"]
    assert found["too_long"].startswith(("ContextWindowExceededError", "BadRequestError"))


def test_anthropic(clients: Clients, burger: RealServer) -> None:
    found = clients.program("anthropic_messages.py", burger.url, MODEL)
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    assert found["asynchronous"] == [found["text"]] * 4
    assert found["pieces"] > 1
    assert found["reasons"] == ["end_turn", "end_turn", "tool_use"]
    assert found["usage"][0] == found["usage"][1] > 0
    assert found["counted"][0] == found["counted"][1]
    assert found["call"][0] == "weather"
    assert found["call"][1]["city"] in ("Paris", "Rome")
    assert found["after_call"] in ("end_turn", "max_tokens")
    assert found["tool_runner"] == [2, ["tool_use"] * 2, 2]
    assert found["models"][0] == [MODEL, "model", MODEL]
    assert found["request_id"]
    for name, kind, said in (
        ("unknown", "NotFoundError", "other"),
        ("too_long", "BadRequestError", "maximum context length is 1024 tokens"),
        ("thinking", "BadRequestError", "no budget of thinking"),
    ):
        assert found[name].startswith(kind)
        assert said in found[name]


def test_pydantic_ai_and_instructor(clients: Clients, burger: RealServer) -> None:
    found = clients.program("typed_answers.py", f"{burger.url}/v1", MODEL)
    assert "Paris" in found["text"]
    assert found["streamed"] == found["text"]
    assert found["pieces"] > 1
    assert found["output_tokens"] > 0
    assert found["instructor"].keys() == {"TOOLS", "JSON_SCHEMA"}
    for ship in (found["typed"], *found["instructor"].values()):
        assert ship.keys() == {"name", "year"}
        assert isinstance(ship["year"], int)


def test_llm_command(clients: Clients, burger: RealServer, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: burger\n  model_name: {MODEL}\n  api_base: {burger.url}/v1\n  api_key_name: none\n"
        "  supports_schema: true\n"
    )
    question, options = "Name the capital of France.", ("-o", "temperature", "0", "-o", "max_tokens", "32")
    here = {"LLM_USER_PATH": str(tmp_path)}
    streamed = clients.run("llm", "-m", "burger", "--key", "none", question, *options, **here)
    assert "Paris" in streamed
    assert clients.run("llm", "-m", "burger", "--key", "none", "--no-stream", question, *options, **here) == streamed
    ship = {"properties": {"name": {"type": "string", "maxLength": 20}, "year": {"type": "integer"}}}
    schema = json.dumps({"type": "object", **ship, "required": ["name", "year"], "additionalProperties": False})
    asked = ("Invent a ship", "-o", "max_tokens", "100", "--schema", schema)
    answer = clients.run("llm", "-m", "burger", "--key", "none", *asked, **here)
    assert json.loads(answer).keys() == {"name", "year"}
    assert "Paris" in clients.run("llm", "logs", "-n", "5", **here)


@pytest.fixture(scope="module")
def curl() -> str:
    found = shutil.which("curl")
    assert found is not None, "curl is not installed"
    return found


def test_curl_shows_each_group_as_it_comes(curl: str, burger: RealServer) -> None:
    body = {"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 24, "stream": True}
    done = subprocess.run(
        [curl, "-sN", f"{burger.url}/v1/chat/completions", "-H", "Content-Type: application/json",
         "-d", json.dumps(body)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    *events, end, rest = done.stdout.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    assert len(events) > 2
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert pieces[0]["delta"]["role"] == "assistant"
    assert pieces[-1]["finish_reason"] in ("stop", "length")
