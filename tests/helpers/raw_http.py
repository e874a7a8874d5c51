"""A server that waits little for its clients, and requests that are sent to it byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from serving import ByChoice, Served, on_port, serving

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
