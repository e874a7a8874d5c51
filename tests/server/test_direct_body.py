"""Events that leave in the callback that brings their group: the same bytes as by the application's `send`."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from fakes import EOS
from gates import StepGate
from hamburger.engine.request import RequestUpdate
from hamburger.engine.request_stream import StreamItem
from hamburger.engine.types.errors import EngineDead
from hamburger.server.api.generation import Generation
from hamburger.server.operation.direct_body import DirectBody, direct_body_of
from serving import CHAT, COMPLETIONS, HELLO, ByChoice, on_port, serving

STREAMS = [
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HELLO, "n": 3, "return_groups": True}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "logprobs": 1, "n": 2}),
]
GROUPS = [[97], [98], [99], [100], [EOS]]


def scripts(**options: Any) -> ByChoice:
    return ByChoice(*[GROUPS] * 4, **options)


async def read_step_by_step(gate: StepGate, url: str, body: dict[str, Any]) -> str:
    """The answer's text, from an engine that takes its next step when what came of the last one has arrived: the server
    waits for it."""
    chunks, arrived = list[bytes](), asyncio.Event()

    async def read() -> None:
        async with httpx.AsyncClient(timeout=None) as client, client.stream("POST", url, json=body) as answer:
            async for chunk in answer.aiter_raw():
                chunks.append(chunk)
                arrived.set()

    async with asyncio.timeout(60):
        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda task: arrived.set())
        while not reading.done():
            gate.step()
            with suppress(TimeoutError):  # not every step makes an event
                async with asyncio.timeout(0.5):
                    await arrived.wait()
            arrived.clear()
        await reading
    return b"".join(chunks).decode()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    pieces: list[bytes] = []
    write = DirectBody.write

    def noted(self: DirectBody, body: bytes) -> None:
        pieces.append(body)
        write(self, body)

    monkeypatch.setattr(DirectBody, "write", noted)
    return pieces


def comparable(text: str) -> list[str]:
    """Events without ids and times, those of each choice in their order."""
    plain = re.sub(r'"(id|created)":("[^"]*"|\d+)', r'"\1":0', text)
    return sorted(plain.split("\n\n"), key=lambda event: re.findall(r'"index":(\d+),"(?:logprobs|text)', event))


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_is_the_same_whichever_way_it_leaves(
    path: str, body: dict[str, Any], written: list[bytes]
) -> None:
    async with serving(runner=scripts()) as server:
        plain = await server.post(path, body | {"stream": True})
    assert not written  # no server of ours is between
    gate = StepGate()
    async with serving(runner=scripts(gate=gate)) as server, on_port(server.app) as port:
        direct = await read_step_by_step(gate, f"http://127.0.0.1:{port}{path}", body | {"stream": True})
    assert written
    assert comparable(direct) == comparable(plain.text)
    assert direct.endswith("data: [DONE]\n\n")


async def test_http_1_0_has_no_chunks(written: list[bytes]) -> None:
    async with serving(runner=scripts()) as server, on_port(server.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "ab", "stream": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 32\r\n\r\n" + body
        )
        answer = await reader.read()
        writer.close()
    assert answer.partition(b"\r\n\r\n")[2].startswith(b"data: {")
    assert answer.endswith(b"data: [DONE]\n\n")
    assert not written


async def test_a_client_that_reads_late_gets_all_in_order(written: list[bytes]) -> None:
    """What its connection does not take at once waits for `send`."""
    pieces = [b"%06d" % i + b"x" * 20_000 for i in range(500)]
    is_ready: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = direct_body_of(scope)
        assert body is not None
        assert not body.is_ready  # it has not begun
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in pieces:
            is_ready.append(body.is_ready)
            if body.is_ready:
                body.write(piece)
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        body.write(b"")  # no end of it
        await send({"type": "http.response.body", "body": b"end", "more_body": False})
        assert not body.is_ready

    async with on_port(cast(FastAPI, app)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(0.1)
        chunked = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
    assert {True, False} <= set(is_ready)
    assert written
    received = b""
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        received, chunked = received + chunked[: int(size, 16)], chunked[int(size, 16) + 2 :]
    assert received == b"".join(pieces) + b"end"


async def test_a_client_that_has_left_takes_nothing() -> None:
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = direct_body_of(scope)
        assert body is not None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass
        if not body.is_ready:
            left.set()

    async with on_port(cast(FastAPI, app)) as port, asyncio.timeout(10):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.close()
        await left.wait()


class Told:
    """A RequestStream that is told what to tell."""

    def tell(self, take: Any) -> None:
        self.put = take


def update(number: int) -> RequestUpdate:
    return RequestUpdate(str(number), [1] * number, [], None, number, number, None, None)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans())), st.sampled_from([None, EngineDead("it is")])
)
def test_groups_keep_their_order_whoever_takes_them(
    arrivals: list[tuple[int, bool, bool]], error: EngineDead | None
) -> None:
    """Each group is taken once, by the offered taker or by whoever iterates, and never before an earlier one."""

    async def run() -> None:
        streams = [Told() for _ in range(3)]
        counted: list[int] = []
        taken: list[tuple[int, int]] = []
        takes = True
        generation = Generation(cast(Any, streams), counted.append)
        ended: list[BaseException | None] = []

        def at_once(index: int, group: RequestUpdate) -> bool:
            if takes:
                taken.append((index, group.completion_tokens))
            return takes

        async def read() -> None:
            try:
                async for index, group in generation:
                    taken.append((index, group.completion_tokens))
                    await asyncio.sleep(0)
                ended.append(None)
            except EngineDead as failure:
                ended.append(failure)

        generation.offer(at_once)
        reading = asyncio.create_task(read())
        for number, (index, takes, pauses) in enumerate(arrivals):  # noqa: B007
            streams[index].put(update(number))
            if pauses:
                await asyncio.sleep(0)
        ends: list[StreamItem] = [error, None, None]
        for stream, item in zip(streams, ends, strict=True):
            stream.put(item)
        await reading
        assert taken == [(index, number) for number, (index, _, _) in enumerate(arrivals)]
        assert counted == list(range(len(arrivals)))
        assert ended == [error]

    asyncio.run(run())
