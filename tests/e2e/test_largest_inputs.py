"""The largest that each endpoint takes, and what is just too large, beside a stream: nobody else has to wait for it.

What holds the server's event loop up holds up every stream and every probe. It does so each time, while a busy machine
does not: of a few tries the best one counts.
"""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hamburger.server.api.answering import MAX_COPIED, MAX_STOP_CHARACTERS
from hamburger.server.api.prompts import MAX_TOKENIZED
from hamburger.server.api.request_body import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES
from hamburger.server.api.tokenizer_routes import MAX_TOKENS
from hamburger.server.bodies.generation import MAX_BIASES
from hamburger.server.responses.items import MAX_ITEMS
from real_server import RealServer

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}
CONTEXT = 8192
MOST_SECONDS = 0.25
STEP_SECONDS = 1.0  # where the stream's own steps are long: /health does not wait for these
TRIES = 5
READINGS = 14  # of as many names as may be, that no longer gap may last: a slower processor takes longer for all
NAMES = json.dumps({f"{i}": "a" for i in range(MAX_NAMES)})
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "a"}
TEXT = [{"type": "text", "text": "a"}]
HELLO = [{"role": "user", "content": "a"}]
BODY = 8 * 2**20 - 300  # characters of one that is not too large


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 2, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 2, **fields}


def called(number: int) -> dict[str, Any]:
    """A call with so many arguments."""
    use = {
        "type": "tool_use",
        "id": "1",
        "name": "f",
        "input": {f"{i}": "a" for i in range(min(number, MAX_NAMES - 20))},
    }
    return {"role": "assistant", "content": [use]}


def tools(number: int, properties: int, description: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    function = {"description": "x" * description, "parameters": parameters}
    return [{"type": "function", "function": {**function, "name": f"f{i}"}} for i in range(number)]


class Case(NamedTuple):
    path: str
    status: int
    body: Callable[[], dict[str, Any]]
    stream_seconds: float = MOST_SECONDS


CASES = {
    "as many messages as there may be": Case(
        CHAT,
        400,
        lambda: chat(messages=HELLO * (MAX_CONTAINERS - 2)),  # more than the context holds
    ),
    "more messages": Case(CHAT, 400, lambda: chat(messages=HELLO * (BODY // 35))),
    "one message": Case(CHAT, 400, lambda: chat(messages=[{"role": "user", "content": "a " * (BODY // 2)}])),
    "a message that is only just tokenized": Case(
        CHAT, 400, lambda: chat(messages=[{"role": "user", "content": "a " * (CONTEXT * 60)}])
    ),
    "an adapter's name": Case("/v1/load_lora_adapter", 403, lambda: {"lora_name": "a" * BODY, "lora_path": "b"}),
    "another's": Case("/v1/unload_lora_adapter", 403, lambda: {"lora_name": "a" * BODY}),
    "many tools": Case(CHAT, 400, lambda: chat(tools=tools(128, 200, 30_000), tool_choice="auto")),
    "variables of the template": Case(CHAT, 200, lambda: chat(chat_template_kwargs={"a": [0] * (MAX_VALUES - 9)})),
    "unknown fields": Case(CHAT, 200, lambda: chat(unknown=[[]] * (MAX_CONTAINERS - 9))),
    "more unknown fields": Case(CHAT, 400, lambda: chat(unknown=[[]] * (BODY // 4))),
    "many names": Case(CHAT, 200, lambda: chat(metadata={f"{i}": "a" for i in range(MAX_NAMES - 9)})),
    "a prediction": Case(CHAT, 400, lambda: chat(prediction={"type": "content", "content": "a " * (CONTEXT * 60)})),
    "token ids of many prompts": Case(COMPLETIONS, 200, lambda: completion(prompt=[[5] * 500] * 590, max_tokens=1)),
    "texts of many prompts": Case(COMPLETIONS, 200, lambda: completion(prompt=["a b c " * 90] * 1000, max_tokens=1)),
    "more prompts": Case(COMPLETIONS, 400, lambda: completion(prompt=["a"] * (BODY // 5))),
    "scores of a long prompt for many": Case(
        COMPLETIONS,
        200,
        lambda: completion(prompt="a " * (CONTEXT - 9), max_tokens=1, echo=True, logprobs=20, n=64),
        STEP_SECONDS,
    ),
    "a long prompt's log-probabilities": Case(
        COMPLETIONS,
        200,
        lambda: completion(prompt="a " * (CONTEXT - 9), max_tokens=1, prompt_logprobs=20, n=64),
        STEP_SECONDS,
    ),
    "a long chat's log-probabilities": Case(
        CHAT,
        200,
        lambda: chat(messages=[{"role": "user", "content": "a " * (CONTEXT - 99)}], prompt_logprobs=20),
        STEP_SECONDS,
    ),
    "many items": Case(RESPONSES, 400, lambda: {"input": HELLO * MAX_ITEMS}),
    "one item": Case(RESPONSES, 400, lambda: {"input": "a " * (BODY // 2)}),
    "items to count": Case(f"{RESPONSES}/input_tokens", 200, lambda: {"input": HELLO * MAX_ITEMS}),
    "a text to count": Case(f"{RESPONSES}/input_tokens", 200, lambda: {"input": "ሴ" * (MAX_TOKENIZED - 999)}),
    "one that is too long": Case(f"{RESPONSES}/input_tokens", 400, lambda: {"input": "a " * (BODY // 2)}),
    "a conversation of many calls": Case(
        RESPONSES, 400, lambda: {"input": [CALLED, OUTPUT] * (MAX_ITEMS // 2), "store": False}
    ),
    "many blocks": Case(
        MESSAGES, 400, lambda: {"max_tokens": 2, "messages": [{"role": "user", "content": TEXT * (MAX_CONTAINERS - 3)}]}
    ),
    "arguments of a call": Case(MESSAGES, 400, lambda: {"max_tokens": 2, "messages": [*HELLO, called(BODY // 12)]}),
    "blocks to count": Case(f"{MESSAGES}/count_tokens", 200, lambda: {"messages": HELLO * MAX_ITEMS}),
    "stop strings": Case(COMPLETIONS, 200, lambda: completion(stop=["a" * (MAX_STOP_CHARACTERS // 256)] * 256, n=64)),
    "biases": Case(
        COMPLETIONS,
        200,
        lambda: completion(logit_bias={f"{i}": 1 for i in range(MAX_BIASES)}, n=MAX_COPIED // MAX_BIASES),
    ),
    "wrong ids": Case(COMPLETIONS, 400, lambda: completion(stop_token_ids=["a"] * (MAX_VALUES - 9))),
    "stop ids": Case(
        COMPLETIONS, 200, lambda: completion(stop_token_ids=[*range(MAX_BIASES)], n=MAX_COPIED // MAX_BIASES)
    ),
    "a text to tokenize": Case("/tokenize", 200, lambda: {"prompt": "ሴ" * MAX_TOKENIZED}),
    "the tokens' texts": Case("/tokenize", 200, lambda: {"prompt": "a " * 200_000, "return_token_strs": True}),
    "tokens to write": Case("/detokenize", 200, lambda: {"tokens": [12345] * MAX_TOKENS}),
}


@pytest.fixture(scope="module")
def server(grafted_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A small model with a long context."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(grafted_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["trunk"]["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    with RealServer(str(folder), "--dtype", "float32", "--kv-cache-memory", "64MiB") as server:
        yield server


def test_every_endpoint_that_takes_a_body_is_tried(server: RealServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    taking = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert taking == {case.path for case in CASES.values()}


@pytest.mark.parametrize("name", CASES)
def test_nobody_waits_for_it(server: RealServer, name: str) -> None:
    path, status, body, stream_seconds = CASES[name]
    data = json.dumps(body(), ensure_ascii=False, separators=(",", ":")).encode()
    found = []
    for _ in range(TRIES):
        before = reading_seconds()
        found.append(beside(server.port, path, data, status))
        gap, health = found[-1]
        # Beside other tests everything takes longer.
        least = READINGS * max(before, reading_seconds())
        if gap <= max(stream_seconds, least) and health <= max(MOST_SECONDS, least):
            return
    pytest.fail(f"the longest gap of a stream and the slowest /health, in seconds, of each try: {found}")


def reading_seconds() -> float:
    """What reading a body of as many names as may be takes at this time."""
    began = time.monotonic()
    json.loads(NAMES)
    return time.monotonic() - began


def beside(port: int, path: str, data: bytes, status: int) -> tuple[float, float]:
    """Send it. Returns the longest gap of a stream and the slowest /health meanwhile."""
    has_begun, is_over = threading.Event(), threading.Event()
    gaps: list[float] = []
    answers: list[int] = []

    def connect(seconds: float = 60) -> Any:
        return closing(http.client.HTTPConnection("127.0.0.1", port, timeout=seconds))

    def stream() -> None:
        fields = completion(prompt="Once", max_tokens=CONTEXT - 100, ignore_eos=True, stream=True, priority=-1)
        with connect() as connection:
            connection.request("POST", COMPLETIONS, json.dumps(fields), JSON)
            with connection.getresponse() as response:
                last = None
                while not is_over.is_set() and (line := response.readline()):
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        gaps.append(0.0 if last is None else now - last)
                        last = now
                        has_begun.set()

    def attack() -> None:
        with connect(120) as connection:
            connection.request("POST", path, data, JSON)
            response = connection.getresponse()
            while response.read(2**20):
                pass
            answers.append(response.status)

    def poll(connection: http.client.HTTPConnection) -> float:
        began = time.monotonic()
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        return time.monotonic() - began

    watch, sender = threading.Thread(target=stream), threading.Thread(target=attack)
    watch.start()
    assert has_begun.wait(60)
    gaps.clear()
    sender.start()
    with connect() as probe:
        slowest = poll(probe)
        while sender.is_alive():
            slowest = max(slowest, poll(probe))
            time.sleep(0.005)
    is_over.set()
    watch.join()
    sender.join()
    assert answers == [status]
    return max(gaps, default=0.0), slowest
