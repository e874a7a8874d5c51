"""Connections that take too much: heads and bodies that never end, readers that do not read, and too many of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any, cast
from unittest.mock import Mock

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from hamburger.server.operation import connections
from hamburger.server.operation.connections import PROBE_PLACES, PROBE_SECONDS, bounded_protocol
from raw_http import POST, asked, impatient
from serving import on_port, until


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second in which the application may answer a slow body itself, a tenth: here it does not try."""
    monkeypatch.setattr(connections, "_GRACE_SECONDS", 0.1)


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("data", [b"", b"GET", POST, POST + b"X-Slow: a"])
async def test_a_head_that_never_ends_is_a_408(data: bytes) -> None:
    async with impatient() as (server, port):
        head, _, body = (await asked(port, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert server.metric("request_failure_total") == bool(data)  # unused connections are opened by many


@pytest.mark.usefixtures("short_grace")
async def test_dripping_does_not_help() -> None:
    """Each byte comes in time, the whole request does not."""
    async with impatient() as (_, port):
        drip = [b"X-Slow: a\r\n"] * 100
        assert (await asked(port, POST, *drip)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_never_ends_is_a_408_in_the_one_shape() -> None:
    async with impatient() as (server, port):
        answer = await asked(port, POST + b'Content-Length: 99\r\n\r\n{"prompt"')
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "client_seconds" in json.loads(body)["error"]["message"]
        assert server.metric("request_failure_total", code="408") == 1


@pytest.mark.usefixtures("short_grace")
async def test_a_body_that_nobody_reads_ends_the_connection() -> None:
    async with impatient() as (_, port):
        answer = await asked(port, b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n", *[b"x"] * 20)
        assert answer.startswith(b"HTTP/1.1 200 ")  # and then it is closed, or `asked` would wait


def test_a_head_and_a_body_have_their_own_time() -> None:
    """Not what is left of the connection's, or of each other's; and bytes that come later give no more of it."""
    loop, transport = Mock(), Mock()

    def create_task(work: Coroutine[Any, Any, None]) -> Mock:
        work.close()
        return Mock()

    loop.create_task.side_effect = create_task
    timers: list[Mock] = []

    def call_later(*_: object) -> Mock:
        timers.append(Mock())
        return timers[-1]

    loop.call_later.side_effect = call_later
    protocol = connected(loop, transport)
    head = POST + b"Content-Length: 9\r\n\r\n"
    for data, count in [(head[:5], 2), (head[5:20], 2), (head[20:] + b"1", 3), (b"2345678", 3), (b"9", 3)]:
        protocol.data_received(data)
        assert len(timers) == count
        assert all(timer.cancel.called for timer in timers[:-1])
        assert timers[-1].cancel.called == (data == b"9")


def test_a_connection_is_read_little_by_little() -> None:
    """A read is taken apart in one go: as chunks of one byte 256 KiB hold up everybody for a third of a second."""
    transport = Mock(max_size=256 * 1024)
    connected(Mock(), transport)
    assert transport.max_size == 4096


@pytest.mark.usefixtures("short_grace")
async def test_a_slow_body_is_a_408_whatever_the_application_does() -> None:
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while not told or told[-1] != "http.disconnect":
            told.append((await receive())["type"])

    async with on_port(cast(FastAPI, app), client_seconds=0.1) as port:
        answer = await asked(port, POST + b"Content-Length: 99\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        await until(lambda: told[-1:] == ["http.disconnect"])


async def test_a_head_that_is_too_large_is_a_400() -> None:
    async with impatient() as (server, port):
        many = b"".join(b"X-%d: a\r\n" % i for i in range(3000))
        for head in (POST + b"X-Large: " + b"a" * 30_000, POST + many):
            assert (await asked(port, head)).startswith(b"HTTP/1.1 400 ")
        assert server.metric("request_failure_total", code="400", reason="") == 2


async def test_a_reader_that_does_not_read_is_given_up() -> None:
    """Its request is told that the client has gone, which aborts an answer."""
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        while not told or told[-1] != "http.disconnect":
            told.append((await receive())["type"])

    async with on_port(cast(FastAPI, app), client_seconds=0.1) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: "http.disconnect" in told)
        writer.close()


def connected(loop: Mock, transport: Mock) -> Any:
    """A protocol of a server that gives its clients a minute, whose time is the mock's."""
    transport.get_extra_info.return_value = None
    transport.is_closing.return_value = False
    config = uvicorn.Config(lambda: None, http=bounded_protocol(8, 60, Mock()), lifespan="off")
    config.load()
    protocol = cast(Any, config.http_protocol_class)(config, ServerState(), {}, _loop=loop)
    protocol.connection_made(transport)
    return protocol


def test_a_slow_reader_is_not() -> None:
    """The time begins anew as long as something was read of what waits."""
    loop, transport = Mock(), Mock()
    protocol = connected(loop, transport)

    def run_last_timer() -> None:
        seconds, work = loop.call_later.call_args.args
        assert seconds == 60
        work()

    transport.get_write_buffer_size.return_value = 9000
    protocol.pause_writing()
    for left in (8000, 7999, 1):
        transport.get_write_buffer_size.return_value = left
        run_last_timer()
    transport.abort.assert_not_called()
    run_last_timer()  # nothing was read since
    transport.abort.assert_called_once()


async def test_connections_beyond_the_limit_are_a_503_and_others_go_on() -> None:
    async with impatient(client_seconds=60, max_connections=2) as (server, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: True)
        refused = await asked(port, b"")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After" in refused
        assert b'"code": "too_many_connections"' in refused
        assert server.metric("request_failure_total", code="503", reason="too_many_connections") == 1
        reader, writer = held[0]
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        for _, writer in held:
            writer.close()


async def test_who_watches_a_crowded_server_is_answered_once_a_connection() -> None:
    async with impatient(client_seconds=60, max_connections=2) as (server, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: True)
        for path in ("/health", "/ready", "/metrics", "/metrics?a=b"):
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\n".encode()
            assert (await asked(port, head, b"\r\n")).startswith(b"HTTP/1.1 200 ")
            pipelined = await asked(port, head + b"\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert pipelined.count(b"HTTP/1.1 ") == 1
        assert server.metric("request_failure_total", code="503", reason="too_many_connections") == 0
        for line in (b"GET /v1/models HTTP/1.1", b"POST /health HTTP/1.1", b"GET /healthy HTTP/1.1"):
            assert (await asked(port, line + b"\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        assert (await asked(port, b"GET /health HTTP/1.1\r\nHost:")).startswith(b"HTTP/1.1 408 ")  # it has moments
        beyond = [await asyncio.open_connection("127.0.0.1", port) for _ in range(PROBE_PLACES)]
        began = time.monotonic()
        assert (await asked(port, b"")).startswith(b"HTTP/1.1 503 ")
        assert time.monotonic() - began < PROBE_SECONDS / 2
        for reader, _ in beyond:
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        for _, writer in [*held, *beyond]:
            writer.close()
