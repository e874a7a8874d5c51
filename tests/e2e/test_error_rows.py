"""The error rows of the wire contract, one after the other on one real server with a key and a queue of one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from real_server import RealServer

KEY = {"Authorization": "Bearer secret"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def strict(grafted_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Configured by a YAML file and the environment, as an operator would."""
    config = tmp_path_factory.mktemp("config") / "serve.yaml"
    config.write_text("served_model_name: burger\ndtype: float32\nkv_cache_memory: 16MiB\nmax_num_seqs: 1\n")
    env = {"HAMBURGER_API_KEY": "other,secret", "HAMBURGER_MAX_QUEUE": "1"}
    with RealServer(str(grafted_folder), "--config", str(config), "--max-model-len", "256", env=env) as server:
        yield server


def refused(server: RealServer, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], httpx.Headers]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(
        server.url + path,
        content=content,
        headers={"Content-Type": "application/json", **KEY, **headers},
        timeout=30,
        verify=False,
    )
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error, response.headers


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (CHAT, {"model": "nope"}, 404, "model"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 300}]}, 400, "messages"),
        (COMPLETIONS, {"prompt": [5] * 256}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 250, "max_tokens": 7}, 400, "max_tokens"),
        (CHAT, {"max_tokens": 256}, 400, "max_tokens"),
        (CHAT, {"max_tokens": -1}, 400, "max_tokens"),
        (CHAT, {"temperature": -1}, 400, "temperature"),
        (CHAT, {"temperature": "hot"}, 400, "temperature"),
        (CHAT, {"top_p": 0}, 400, "top_p"),
        (CHAT, {"n": 0}, 400, "n"),
        (CHAT, {"confidence": 1.5}, 400, "confidence"),
        (CHAT, {"logit_bias": {"49152": 1}}, 400, "logit_bias"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "not a name"}}]}, 400, "tools"),
        (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format"),
        (COMPLETIONS, {"suffix": "x"}, 400, "suffix"),
        (CHAT, {"echo": True}, 400, "echo"),
        (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ],
)
def test_a_request_that_cannot_succeed(
    strict: RealServer, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    got, error, _ = refused(strict, path, {**body, **fields})
    assert (got, error["param"]) == (status, param), error


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": NaN}', b"\xff"])
def test_a_body_that_is_no_json_object(strict: RealServer, body: bytes) -> None:
    assert refused(strict, COMPLETIONS, body)[0] == 400


def test_a_wrong_key(strict: RealServer) -> None:
    status, error, headers = refused(strict, CHAT, {"messages": HELLO}, Authorization="Bearer wrong")
    assert (status, error["code"]) == (401, "invalid_api_key")
    assert headers["www-authenticate"] == "Bearer"


def test_unknown_extra_fields_pass(strict: RealServer) -> None:
    body = {"prompt": "Hello", "max_tokens": 1, "gen_kwarg_of_somebody": [1, 2], "user": "me", "store": False}
    assert httpx.post(strict.url + COMPLETIONS, json=body, headers=KEY, timeout=30, verify=False).status_code == 200


def test_a_full_queue(strict: RealServer) -> None:
    statuses: list[int] = []
    retry_after: list[str] = []

    def ask() -> None:
        body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "confidence": 1}
        response = httpx.post(strict.url + COMPLETIONS, json=body, headers=KEY, timeout=60, verify=False)
        statuses.append(response.status_code)
        if response.status_code == 429:
            retry_after.append(response.headers["retry-after"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(60)
    assert set(statuses) == {200, 429}
    assert all(int(value) >= 1 for value in retry_after)
    strict.wait_idle()
