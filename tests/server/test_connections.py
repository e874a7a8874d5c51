"""Connections that take too much: heads and bodies that never end, readers that do not read, and too many of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import Mock

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from fakes import EOS
from hamburger.server.operation import connections
from hamburger.server.operation.connections import PROBE_PLACES, PROBE_SECONDS, bounded_protocol
from serving import COMPLETIONS, ByChoice, Served, on_port, serving, until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def impatient(runner: ByChoice | None = None, **settings: float) -> AsyncIterator[tuple[Served, int]]:
    """A server that waits a tenth of a second for its clients."""
    chosen: dict[str, Any] = {"client_seconds": 0.1, **settings}
    async with serving([[97]], runner=runner, settings=chosen) as server, on_port(server.app, **chosen) as port:
        yield server, port


async def asked(port: int, data: bytes, *more: bytes) -> bytes:
    """What is answered until the connection is closed; `more` is sent a little later, piece by piece."""
    answer = b""

    async def read() -> None:
        nonlocal answer
        with contextlib.suppress(ConnectionError):  # it was closed on what was still being sent
            while chunk := await reader.read(1000):
                answer += chunk

    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(read())
        writer.write(data)
        for piece in more:
            await asyncio.wait({reading}, timeout=0.02)
            if not reading.done():
                writer.write(piece)
        await reading
        writer.close()
    return answer


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


@pytest.mark.usefixtures("short_grace")
async def test_the_next_request_that_never_ends_does_not_disturb_the_answer_before_it() -> None:
    """Neither a slow head nor one that is too large: nothing is written into the answer that is being given."""
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
