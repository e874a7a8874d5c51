"""A stream that is silent for long is sent comments, so that no proxy cuts it; its events are what they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from fakes import EOS
from gates import StepGate
from hamburger.server.api.generation import Generation
from serving import CHAT, COMPLETIONS, HELLO, ByChoice, Served, on_port, serving, until

COMMENT = ": keep-alive"
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "a"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/responses": {"input": "a"},
}


@asynccontextmanager
async def silent(runner: ByChoice) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """A server of short patience, over a real connection."""
    async with (
        serving(runner=runner, settings={"sse_keep_alive_seconds": 0.05}) as server,
        on_port(server.app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield server, client


@pytest.mark.parametrize("path", PATHS)
async def test_comments_come_before_the_first_token_and_in_gaps(path: str) -> None:
    gate = StepGate()
    async with silent(ByChoice([[97], [98], [EOS]], gate=gate)) as (_, client):
        body = {"stream": True} | PATHS[path]
        lines, num_comments = [], 0
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                num_comments += line == COMMENT
                if line == COMMENT and num_comments in (2, 4, 6):  # each of the three steps is waited for
                    gate.step()
        gate.set()
        without = (await client.post(path, json=body)).text.split("\n")
    assert lines[0] == COMMENT
    assert num_comments >= 6
    events = [line for line in lines if line not in (COMMENT, "")]
    assert len(events) == len([line for line in without if line not in (COMMENT, "")])
    assert ':"a"' in "".join(events)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_text_that_is_held_back_is_silence(path: str) -> None:
    gate = StepGate()
    async with silent(ByChoice([[97], *[[122]] * 10, [98], [EOS]], gate=gate)) as (_, client):
        body = {"stream": True, "stop": "z" * 11, "max_tokens": 20} | PATHS[path]
        lines: list[str] = []

        async def read() -> None:
            async with client.stream("POST", path, json=body) as response:
                async for line in response.aiter_lines():
                    lines.append(line)

        reading = asyncio.create_task(read())
        gate.step()
        await until(lambda: any('"a"' in line for line in lines))
        seen = len(lines)
        for _ in range(10):
            gate.step()
            await asyncio.sleep(0.02)
        held = [line for line in lines[seen:] if line]
        assert held.count(COMMENT) == len(held) >= 2
        gate.set()
        await reading
    assert any("z" * 10 + "b" in line for line in lines)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_groups_that_are_held_back_are_told_where_they_were_asked_for(path: str) -> None:
    asked = {"max_tokens": 20, "stop": "zzz", **PATHS[path]}
    ids = [97, 122, 122, 98, EOS]
    async with serving([[token_id] for token_id in ids]) as server:
        assert len(await server.stream(path, **asked)) == 3  # a, zzb, the end
        groups = [chunk["choices"][0].get("group") for chunk in await server.stream(path, **asked, return_groups=True)]
        assert [token_id for group in groups if group for token_id in group["token_ids"]] == ids
        told = [chunk["choices"][0]["token_ids"] for chunk in await server.stream(path, **asked, return_token_ids=True)]
        assert [token_id for part in told for token_id in part] == ids
        options = {"include_usage": True, "continuous_usage_stats": True}
        counts = [
            chunk["usage"]["completion_tokens"] for chunk in await server.stream(path, **asked, stream_options=options)
        ]
        assert counts == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("over_a_connection", [True, False])
async def test_silence_ends_with_each_event(over_a_connection: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Mock()
    monkeypatch.setattr(Generation, "has_sent", lambda self: sent())
    gate = StepGate()
    async with serving(runner=ByChoice([[97], [98], [99], [EOS]], gate=gate)) as server, on_port(server.app) as port:
        url = f"http://127.0.0.1:{port}" if over_a_connection else "http://server"
        transport = None if over_a_connection else httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(base_url=url, transport=transport, timeout=20) as client:
            asking = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "stream": True}))
            for step in range(1, 4):
                gate.step()
                await until(lambda: server.runner.num_steps > step)  # noqa: B023 - it is awaited here
                await asyncio.sleep(0.05)  # whoever sends it waits for the next one again
            gate.set()
            assert '"c"' in (await asking).text
    assert sent.call_count == 3  # the first event ends the first silence


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_behind_a_comment_is_an_event(path: str) -> None:
    gate = StepGate()
    async with silent(ByChoice([[97]] * 9, gate=gate, fail_at_step=1)) as (server, client):
        lines = []
        async with client.stream("POST", path, json={"stream": True} | PATHS[path]) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                gate.set()
        assert server.metric("request_failure_total", code="503", reason="engine_unavailable") == 1
    assert lines[0] == COMMENT
    assert "error" in "".join(lines[1:])
    if path in (CHAT, COMPLETIONS):
        assert lines[-2] == "data: [DONE]"
    if path == "/v1/responses":
        kinds = [line.removeprefix("event: response.") for line in lines if line.startswith("event: ")]
        assert kinds == ["created", "in_progress", "event: error", "failed"]


async def test_no_comment_is_sent_while_events_come_or_where_none_is_wanted() -> None:
    for seconds in (30, 0):
        async with serving([[97], [98], [EOS]], settings={"sse_keep_alive_seconds": seconds}) as server:
            chunks: list[Any] = await server.stream(CHAT, messages=HELLO)
            assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "ab"


async def test_who_is_given_up_is_listened_to_no_more() -> None:
    """Also where nobody closes what listens, as no iterator of an answer that nobody reads is closed."""
    stream = Mock(request=Mock(arrival_time=0.0))
    generation = Generation([stream], Mock(), Mock())
    listening = generation.or_silence(0.01)
    assert await anext(listening) is None
    generation.abort()
    await asyncio.sleep(0.05)
    assert not generation._arrived._items
    await listening.aclose()
