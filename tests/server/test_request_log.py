"""The log's line of each request: counts and times, whole, streamed, refused or abandoned; never a text or key."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from fakes import EOS
from gates import StepGate
from hamburger.engine.logs import JsonFormatter, TextFormatter
from hamburger.server.operation import connections
from hamburger.server.operation.middleware import RequestIds
from hamburger.server.operation.request_log import FIELDS
from serving import CHAT, COMPLETIONS, HELLO, MODEL, ByChoice, on_port, serving, split, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The fields of the request lines so far."""
    caplog.set_level(logging.INFO, logger="hamburger.request")
    return lambda: [vars(record)["fields"] for record in caplog.records if record.name == "hamburger.request"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_has_counts_and_times(lines: Lines, stream: bool) -> None:
    headers = {"X-Request-Id": "mine"}
    async with serving([[*b"ab"], [*b"c"], [EOS]], [[*b"abc"], [*b"d"], [*b"e"]]) as server:
        body = {"messages": HELLO, "n": 2, "max_tokens": 5, "stream": stream}
        response = await server.post(CHAT, body, headers=headers)
        assert response.status_code == 200
    [line] = lines()
    assert tuple(line) == FIELDS
    answer_id = response.text.partition('"id":"')[2].partition('"')[0]
    assert answer_id.startswith("chatcmpl-")
    times = {name: line.pop(name) for name in ("queue_seconds", "ttft_seconds", "seconds")}
    assert 0 <= times["queue_seconds"] <= times["ttft_seconds"] <= times["seconds"]
    assert line == {
        "request_id": "mine", "answer_id": answer_id, "client": "127.0.0.1", "key": None, "method": "POST",
        "path": CHAT, "status": 200,
        "model": MODEL, "stream": stream, "choices": 2, "prompt_tokens": len(b"user: hello\nassistant: "),
        "completion_tokens": 9, "kv_slots": 6, "tokens_per_kv": 1.5, "macro_steps": 6, "tokens_per_step": 1.5,
        "drafted_tokens": 0,
        "accepted_tokens": 0, "cached_tokens": 0, "finish_reason": "length,stop", "error": None,
        "param": None, "client_left": False, "bytes": len(response.content),
    }  # fmt: skip


async def test_refused_requests_say_why(lines: Lines) -> None:
    async with serving([[EOS]], settings={"api_key": "k"}) as server:
        headers = {"Authorization": "Bearer k"}
        await server.post(COMPLETIONS, {"prompt": 7}, headers=headers)
        await server.post(COMPLETIONS, {"prompt": "a", "model": f"{MODEL}@0.5"})
        await server.post(COMPLETIONS, {"prompt": "a", "model": "gpt-4"}, headers=headers)
        await server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 10**6}, headers=headers)
        await server.client.get("/nothing")
        server.engine.drain()
        await server.post(COMPLETIONS, {"prompt": "a", "stream": True}, headers=headers)
    assert [(line["status"], line["error"], line["param"], line["model"]) for line in lines()] == [
        (400, "http_400", "prompt", None),
        (401, "invalid_api_key", None, None),
        (404, "model_not_found", "model", "gpt-4"),
        (400, "context_length_exceeded", "max_tokens", MODEL),
        (404, "http_404", None, None),
        (503, "engine_unavailable", None, MODEL),
    ]
    assert not any(line["client_left"] for line in lines())


async def test_a_stream_that_fails_says_so(lines: Lines) -> None:
    async with serving(runner=ByChoice([[97]] * 9, fail_at_step=3)) as server:
        await server.stream(CHAT)
    [line] = lines()
    assert (line["status"], line["error"], line["finish_reason"]) == (200, "engine_unavailable", "error")
    assert 1 <= line["completion_tokens"] <= 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_is_told(lines: Lines, stream: bool) -> None:
    gate = StepGate()
    async with (
        serving(runner=ByChoice([[97, 98]] * 100, gate=gate)) as server,
        on_port(server.app) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "a", "max_tokens": 150, "stream": stream}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        gate.step()
        if stream:
            await reader.readuntil(b"data: ")
        else:
            await until(lambda: server.engine.health().num_running == 1)
        writer.close()
        await until(lambda: bool(lines()))
        gate.set()
    [line] = lines()
    assert line["client_left"] is True
    assert line["status"] == (200 if stream else 499)
    assert line["finish_reason"] == "abort"
    assert line["error"] == (None if stream else "http_499")
    assert line["completion_tokens"] == (2 if stream else line["completion_tokens"])


async def test_a_body_that_breaks_off_is_the_clients_doing(lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server, on_port(server.app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b'Content-Length: 100\r\n\r\n{"prompt"')
        await writer.drain()
        writer.close()
        await until(lambda: bool(lines()))
        assert server.metric("request_failure_total", code="500") == 0
    [line] = lines()
    assert (line["status"], line["client_left"]) == (499, True)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def until_it_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def test_who_was_too_slow_to_send_did_not_leave(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GRACE_SECONDS", 0.1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await until_it_left(receive)

    async with on_port(cast(FastAPI, RequestIds(app)), client_seconds=0.1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        await until(lambda: bool(lines()))
        writer.close()
    [line] = lines()
    assert (line["status"], line["error"], line["client_left"]) == (408, "http_408", False)


async def test_who_was_too_slow_to_read_did_not_leave(lines: Lines) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await until_it_left(receive)

    async with on_port(cast(FastAPI, RequestIds(app)), client_seconds=0.1) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: bool(lines()))
        writer.close()
    [line] = lines()
    assert (line["status"], line["error"], line["client_left"]) == (200, "http_408", False)


async def test_a_chunk_that_is_none_is_answered_and_told_so(lines: Lines) -> None:
    async with serving() as server, on_port(server.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        await until(lambda: bool(lines()))
        writer.close()
    [line] = lines()
    assert (line["status"], line["error"], line["client_left"]) == (400, "http_400", False)


@pytest.mark.parametrize("said", ["203.0.113.7", "x" * 5000])
async def test_the_client_is_who_connected_whoever_it_says_to_be(lines: Lines, said: str) -> None:
    async with serving() as server, on_port(server.app) as port, httpx.AsyncClient() as client:
        await client.get(f"http://127.0.0.1:{port}/version", headers={"X-Forwarded-For": said})
        await until(lambda: bool(lines()))
    assert [line["client"] for line in lines()] == ["127.0.0.1"]


async def test_probes_are_told_at_debug_unless_they_fail(lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        for path in ("/health", "/ready", "/metrics", "/version"):
            await server.client.get(path)
        assert [line["path"] for line in lines()] == ["/version"]
        server.engine.drain()
        await server.client.get("/ready")
        assert [(line["path"], line["status"]) for line in lines()[1:]] == [("/ready", 503)]
        caplog.set_level(logging.DEBUG, logger="hamburger.request")
        await server.client.get("/health")
        assert lines()[-1]["path"] == "/health"


async def test_without_it_nothing_is_told(lines: Lines) -> None:
    async with serving([[65], [EOS]], settings={"access_log": False}) as server:
        await server.complete()
    assert lines() == []


SECRETS = ("sk-very-secret-key", "sk-wrong-key", "the prompt's words", "the answer's words", "someone@example.com")


async def test_no_line_of_any_level_has_a_text_or_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key, wrong, prompt, answer, user = SECRETS
    settings = {"api_key": key, "cors_origin": "*"}
    async with (
        serving(split(answer, 6, 12), settings=settings, max_model_len=256) as server,
        on_port(server.app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        for header in (key, wrong):
            for stream in (False, True):
                for body in (
                    {"prompt": prompt, "user": user, "stop": [prompt], "cache_salt": prompt},
                    {"prompt": prompt, "max_tokens": prompt},
                    {"prompt": [prompt, 5]},
                    {"prompt": prompt, "structured_outputs": {"regex": f"({prompt}"}},
                    {"prompt": prompt, "x_unknown": prompt},
                ):
                    headers = {"Authorization": f"Bearer {header}", "X-Request-Id": "x\ty"}
                    await client.post(COMPLETIONS, json={**body, "stream": stream}, headers=headers)
            chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 20}
            await client.post(CHAT, json=chat, headers={"Authorization": f"Bearer {header}"})
            await client.post(f"{CHAT}?key={header}", content=prompt.encode())
    # Of other libraries only what is let through: see configure_logging.
    told = [r for r in caplog.records if r.name.startswith("hamburger") or r.levelno >= logging.INFO]
    told = [r for r in told if not r.name.startswith("httpx")]  # this test's own client
    assert len([r for r in told if r.name == "hamburger.request"]) == 24
    for formatter in (TextFormatter(), JsonFormatter()):
        written = "\n".join(formatter.format(record) for record in told)
        for secret in SECRETS:
            assert secret not in written


@pytest.mark.parametrize("name", ["m\nstatus=200 2026 INFO hamburger.request: forged", "m\x1b[31m\u202e", "x" * 5000])
async def test_a_client_forges_no_line(lines: Lines, caplog: pytest.LogCaptureFixture, name: str) -> None:
    async with serving() as server:
        await server.post(COMPLETIONS, {"prompt": "a", "model": name}, headers={"X-Request-Id": "a b\tc"})
        await server.client.get("/" + quote(name[:300]))
    for record in (r for r in caplog.records if r.name == "hamburger.request"):
        for formatter in (TextFormatter(), JsonFormatter()):
            assert formatter.format(record).isprintable()
            assert len(formatter.format(record)) < 1000
    assert [len(line["request_id"]) for line in lines()] == [32, 32]


async def test_a_response_in_the_background_has_its_line_when_it_has_ended(lines: Lines) -> None:
    gate = StepGate()
    async with serving(runner=ByChoice(split("abc", 1, 1, 1), gate=gate)) as server:
        asked = {"input": "Hi", "background": True, "max_output_tokens": 3}
        started = await server.ok("/v1/responses", asked)
        assert started["status"] == "in_progress"
        assert not lines()
        gate.set()
        await until(lambda: bool(lines()))
    [line] = lines()
    assert (line["path"], line["status"], line["client_left"]) == ("/v1/responses", 200, False)
    assert (line["finish_reason"], line["completion_tokens"], line["macro_steps"]) == ("length", 3, 3)
