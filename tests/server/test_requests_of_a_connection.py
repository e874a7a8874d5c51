"""Requests as HTTP lets clients send them: several on a connection, in other forms, and to paths that are none."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from fakes import EOS
from hamburger.server.operation import connections
from raw_http import POST, asked, impatient
from serving import COMPLETIONS, on_port, serving


async def test_a_request_in_time_is_served_on_the_same_connection_again_and_again() -> None:
    async with impatient(client_seconds=5) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
            writer.write(POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"}}}")
        writer.close()
        assert len(server.runner.prompts) == 3
    assert COMPLETIONS.encode() in POST


def ask_for_one_token(*headers: bytes) -> bytes:
    body = b'{"prompt": "a", "max_tokens": 1}'
    return POST + b"".join(header + b"\r\n" for header in (*headers, b"Content-Length: %d" % len(body), b"")) + body


async def test_requests_sent_at_once_are_answered_one_after_the_other() -> None:
    async with impatient(client_seconds=5) as (server, port):
        answer = await asked(port, ask_for_one_token() * 2 + ask_for_one_token(b"Connection: close"))
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert len(server.runner.prompts) == 3


async def test_the_next_request_that_never_ends_does_not_disturb_the_answer_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither a slow head nor one that is too large: nothing is written into the answer that is being given."""
    monkeypatch.setattr(connections, "_GRACE_SECONDS", 0.1)
    for rest in (POST, POST + b"X-Large: " + b"a" * 30_000, POST + b"Content-Length: 99\r\n\r\n{"):
        asks = asyncio.Event()
        go_on = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send, asks: Any = asks, go_on: Any = go_on) -> None:
            asks.set()
            await go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"text"})

        async with on_port(cast(FastAPI, app), client_seconds=0.1) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + rest)
            await asks.wait()
            await asyncio.sleep(0.5)  # longer than a request may take to arrive
            go_on.set()
            assert (await reader.readuntil(b"text")).startswith(b"HTTP/1.1 200 ")
            writer.close()


@pytest.mark.parametrize("behind", [0, 1, 60_000])
async def test_a_client_that_leaves_is_heard_behind_the_beginning_of_its_next_request(behind: int) -> None:
    asks, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        asks.set()
        if (await receive())["type"] == "http.disconnect":
            left.set()

    async with on_port(cast(FastAPI, app), client_seconds=5) as port, asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asks.wait()
        for _ in range(min(behind, 3)):
            writer.write((b"GET /" + b"a" * behind)[: behind // min(behind, 3)])
            await asyncio.sleep(0.02)
        writer.transport.abort()
        await left.wait()


async def test_a_client_that_ends_its_side_behind_two_requests_gets_both_answers() -> None:
    go_on, begun = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        begun.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"b"})

    async with on_port(cast(FastAPI, app), client_seconds=5) as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await begun.wait()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write_eof()
        await asyncio.sleep(0.1)
        go_on.set()
        assert (await reader.read()).count(b"\r\n\r\nab") == 2
        writer.close()


async def test_an_offer_of_http_2_is_left_aside() -> None:
    """Java's HTTP client offers it with every request."""
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB")
    async with impatient(client_seconds=5) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for count in (1, 2):
            writer.write(ask_for_one_token(*offer))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"}}}")
            assert len(server.runner.prompts) == count
        writer.close()


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n"])
async def test_what_is_no_http_is_a_400_in_the_one_shape(data: bytes) -> None:
    async with serving([[97]]) as server, on_port(server.app) as port:
        head, _, body = (await asked(port, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert b"application/json" in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("target", [b"http://x/health", b"HTTP://x:80/health?a=b", b"https://user@x/health"])
async def test_a_target_in_absolute_form_is_its_path(target: bytes) -> None:
    async with serving([[97]]) as server, on_port(server.app) as port:
        answer = await asked(port, b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b'"status":"ok"' in answer


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/embeddings", None),
        ("/nothing", None),
    ],
)
async def test_a_base_url_without_its_version_is_told_so(path: str, named: str | None) -> None:
    async with serving([[EOS]]) as server:
        response = await server.post(path, {})
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert (f"Did you mean {named}?" in message) if named else ("Did you mean" not in message)
        assert (await server.client.head("/v1/models")).status_code == 200


async def test_a_slash_too_many_is_a_404_and_no_way_to_another_server() -> None:
    async with serving([[97]]) as server, on_port(server.app) as port:
        head, _, body = (
            await asked(port, b"GET /version/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        ).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ")
        assert b"evil.example" not in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
