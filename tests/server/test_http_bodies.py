"""Heads of requests that say how a body comes: in a coding, announced, in two lengths, or with another protocol."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest

from serving import CHAT, HELLO, on_port, serving

BODY = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def exchanged(port: int, data: bytes, until: bytes) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """What is answered, up to and with `until`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(20):
        return await reader.readuntil(until), reader, writer


@pytest.mark.parametrize("coding", ["gzip", "br, gzip"])
async def test_a_compressed_body_is_a_415(coding: str) -> None:
    async with serving([[97]]) as server:
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        told = await server.client.post(CHAT, content=gzip.compress(BODY), headers=headers)
        error = told.json()["error"]
        assert (told.status_code, error["param"]) == (415, "Content-Encoding")
        assert coding in error["message"]
        headers["Content-Encoding"] = "identity"
        assert (await server.client.post(CHAT, content=BODY, headers=headers)).status_code == 200


async def test_an_announced_body_that_is_too_large_is_not_asked_for() -> None:
    async with serving([[97]], settings={"max_body_size": 2000}) as server, on_port(server.app) as port:
        head = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        answer, _, writer = await exchanged(port, head % 2001, b"}}")
        assert answer.startswith(b"HTTP/1.1 413 ")
        writer.close()
        answer, reader, writer = await exchanged(port, head % len(BODY), b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 100 ")
        writer.write(BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_request_with_two_lengths_is_the_last_of_its_connection() -> None:
    async with serving([[97]]) as server, on_port(server.app) as port:
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
        both = POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
        again = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(both + again)
        async with asyncio.timeout(20):
            answer = await reader.read()  # until it is closed
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in answer.lower()
        assert answer.count(b"HTTP/1.1") == 1


async def test_a_client_that_offers_http_2_is_served_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    async with serving([[97]]) as server, on_port(server.app) as port:
        answer, _, writer = await exchanged(
            port, POST + offer + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, b"}}"
        )
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if "WebSocket" in record.message or "upgrade" in record.message]
