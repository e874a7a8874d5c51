"""Clients that end their side of a connection: some wait for their answer, some have left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fakes import EOS
from gates import StepGate
from hamburger.server.operation import connections
from serving import ByChoice, on_port, serving, until


async def half_closed(port: int, data: bytes) -> bytes:
    """What is answered to a client that has ended its own side."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
    return answer


def post(version: str = "1.1", **body: Any) -> bytes:
    data = json.dumps({"prompt": "a", "max_tokens": 4, **body}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + data


@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_ended_its_side_gets_its_answer(stream: bool) -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97], [98], [EOS]], gate=gate)) as server, on_port(server.app) as port:
        asking = asyncio.create_task(half_closed(port, post(stream=stream)))
        await until(lambda: server.engine.health().num_waiting + server.engine.health().num_running > 0)
        await asyncio.sleep(0.1)
        gate.set()
        head, _, rest = (await asking).replace(b"HTTP/1.1 102 Processing\r\n\r\n", b"").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert (b"data: [DONE]" in rest) if stream else (b'"ab"' in rest)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_left_altogether_is_noticed(stream: bool, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the second sign of life, without which HTTP/1.0 does."""
    monkeypatch.setattr(connections, "_PROBE_SECONDS", 3600)
    gate = StepGate()
    async with serving(runner=ByChoice([[97]] * 9, gate=gate)) as server, on_port(server.app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(version, stream=stream))
        await until(lambda: server.engine.health().num_waiting + server.engine.health().num_running > 0)
        writer.close()
        await until(lambda: server.metric("request_success_total", finished_reason="abort") == 1)
        gate.set()


async def test_half_a_request_is_none() -> None:
    async with serving([[97]]) as server, on_port(server.app) as port:
        assert await half_closed(port, post()[:-3]) == b""
        assert not server.engine.health().num_running
