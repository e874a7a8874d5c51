"""Room for connections: those that have not shaken hands over TLS yet, bursts of them, and files to open for each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hamburger.server.config import ServeSettings
from hamburger.server.operation.connections import PROBE_SECONDS
from hamburger.server.operation.open_files import allow_open_files, tells_of_no_room
from hamburger.server.operation.seldom import Seldom
from hamburger.server.serve import _Server, uvicorn_config
from serving import Served, on_port, serving, until

TLS = Path(__file__).parents[1] / "data" / "tls"
CERTIFICATE: dict[str, Any] = {"ssl_certfile": TLS / "cert.pem", "ssl_keyfile": TLS / "key.pem"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def secured(**settings: Any) -> AsyncIterator[tuple[Served, int]]:
    async with serving([[97]]) as server, on_port(server.app, **CERTIFICATE, **settings) as port:
        yield server, port


async def silent(port: int) -> Streams:
    """A connection that says nothing, not even to begin a handshake."""
    return await asyncio.open_connection("127.0.0.1", port)


async def ended(streams: Streams) -> None:
    """Wait until the server has closed it, without a word."""
    reader, writer = streams
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):  # that is an end, too
            assert await reader.read() == b""
        writer.close()


async def health(port: int) -> bytes:
    """What is answered over TLS."""
    context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(HEALTH)
        answer = await reader.read()
        writer.close()
    return answer


async def test_connections_without_a_handshake_count() -> None:
    async with secured(max_connections=2, client_seconds=60) as (server, port):
        held = [await silent(port) for _ in range(2)]
        await ended(await silent(port))
        assert server.metric("request_failure_total", code="503", reason="too_many_connections") == 1
        assert (await health(port)).startswith(b"HTTP/1.1 200 ")  # who watches has a place of its own
        for _, writer in held:
            writer.close()
        for _ in range(5):  # they count no more, and nor does one that was served
            answer = await until_served(port)
            assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_connection_too_many_over_tls_is_refused_once() -> None:
    """Its end takes until the client says that it has seen it, and this one reads nothing."""

    def ask_and_read_nothing(port: int) -> None:
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            secure.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(PROBE_SECONDS + 0.5)

    async with secured(max_connections=2, client_seconds=60) as (server, port):
        held = [await silent(port) for _ in range(2)]
        await asyncio.to_thread(ask_and_read_nothing, port)
        assert server.metric("request_failure_total", code="503", reason="too_many_connections") == 1
        for _, writer in held:
            writer.close()


async def until_served(port: int) -> bytes:
    """The server may need a moment to see that a connection has ended."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await health(port)
            except (ConnectionError, ssl.SSLError):
                await asyncio.sleep(0.01)


async def test_a_handshake_that_takes_too_long_is_ended() -> None:
    async with secured(client_seconds=0.2) as (server, port):
        nothing, half = await silent(port), await silent(port)
        half[1].write(b"\x16\x03\x01\x02\x00\x01")  # the first bytes of a ClientHello
        await ended(nothing)
        await ended(half)
        assert server.metric("request_failure_total") == 0  # browsers open some that they do not use


async def test_what_is_no_handshake_is_ended_and_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with secured(client_seconds=60) as (_, port):
        reader, writer = await silent(port)
        writer.write(HEALTH)
        async with asyncio.timeout(20):
            assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        assert (await health(port)).startswith(b"HTTP/1.1 200 ")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_request_right_behind_the_handshake_is_served() -> None:
    """In one piece with the end of it, before the server could take note that it is over."""
    async with secured(client_seconds=60) as (_, port):
        reader, writer = await silent(port)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        async with asyncio.timeout(20):
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    incoming.write(await reader.read(65536))
            client.write(HEALTH)
            writer.write(outgoing.read())
            answer = b""
            while not answer:
                incoming.write(await reader.read(65536))
                with contextlib.suppress(ssl.SSLWantReadError):  # so far tickets only
                    answer = client.read(65536)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_the_end_waits_for_no_handshake() -> None:
    async with asyncio.timeout(30):
        async with secured(client_seconds=600) as (_, port):
            pending = await silent(port)
            assert (await health(port)).startswith(b"HTTP/1.1 200 ")
        await ended(pending)


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
@pytest.mark.parametrize("tls", [False, True])
async def test_a_burst_opens_no_more_files_than_there_is_room_for(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment: those too many are closed about as fast as they are accepted."""
    room: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: room.append(limits[0]))
    allow_open_files(10, 1)
    given: dict[str, Any] = {"max_connections": 10, **(CERTIFICATE if tls else {})}
    async with serving([[97]]) as server:
        most, refused = 0, 0

        def count(status: int, code: str | None) -> None:
            nonlocal most, refused
            refused += 1
            most = max(most, open_files())

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listening = asyncio.Event()
            running = _Server(uvicorn_config(server.app, ServeSettings(**given), count), listening.set)
            task = asyncio.create_task(running.serve(sockets=[listener]))
            await listening.wait()
            clients = [socket.socket() for _ in range(600)]
            before = open_files()
            for client in clients:  # all of them wait to be accepted, or are by now
                client.connect(listener.getsockname())
            await until(lambda: refused == len(clients) - 10)
            for client in clients:
                client.close()
            running.should_exit = True
            await task
    assert most - before <= room[0] - 256


async def test_a_burst_within_the_limit_is_served(caplog: pytest.LogCaptureFixture) -> None:
    async with serving([[97]]) as server, on_port(server.app) as port:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]  # nobody accepts meanwhile
        streams = [await asyncio.open_connection(sock=client) for client in clients]
        for _, writer in streams:
            writer.write(HEALTH)
        for reader, writer in streams:
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_limit_of_open_files_holds_the_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    assert allow_open_files(500, 1) == 500
    assert limits == [(1024, 4096)]
    assert allow_open_files(2048, 1) == 2048
    assert limits[-1] == (2560, 4096)
    assert allow_open_files(2048, 2) == 2048
    assert limits[-1] == (2816, 4096)
    assert caplog.records == []
    assert allow_open_files(10_000, 1) == 4096 - 512  # more could be accepted, and requests not be answered
    assert limits[-1] == (4096, 4096)
    assert "max_connections 10000" in caplog.text


async def test_no_room_for_a_connection_is_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(tells_of_no_room())
    failed = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for _ in range(100):
        context = {"message": "socket.accept() out of system resource", "exception": failed, "socket": Any}
        loop.call_exception_handler(context)
    assert len(caplog.records) <= 3  # one a second
    assert {record.exc_info for record in caplog.records} == {None}
    assert "Too many open files" in caplog.text
    caplog.clear()
    loop.call_exception_handler({"message": "another fault", "exception": ValueError("x")})
    loop.call_exception_handler({"message": "another fault", "exception": failed})
    assert [bool(record.exc_info) for record in caplog.records] == [True, True]


def test_seldom_is_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    seldom = Seldom(logging.getLogger("x"), lambda: now)
    for now in (5.0, 5.1, 5.9, 6.1, 6.2, 7.2):
        seldom.warn("at %g", now)
    assert [record.getMessage() for record in caplog.records] == ["at 5", "at 6.1", "at 7.2"]
