"""An engine that is asked by calls: the app's own answers, and a caller that goes away frees what it held."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from starlette.types import Message

from fakes import EOS
from gates import StepGate
from hamburger.server.replicas.replica import Replica, WholeRequest
from serving import COMPLETIONS, ByChoice, events, serving, split, until


def call(path: str, fields: Any = None, method: str | None = None) -> WholeRequest:
    data = b"" if fields is None else json.dumps(fields).encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method or ("GET" if fields is None else "POST"),
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ["127.0.0.1", 1],
        "extensions": {"not": "passed on"},
    }
    return WholeRequest.of(scope, data)


async def test_answers_are_those_of_the_app() -> None:
    async with serving([*split("hello", 2, 3), [EOS]]) as server:
        replica = Replica(server.app, server.engine)
        streamed = await replica.whole(call(COMPLETIONS, {"prompt": "a", "stream": True}))
        assert "".join(event["choices"][0]["text"] for event in events(streamed.body.decode())) == "hello"
        assert (b"content-type", b"text/event-stream; charset=utf-8") in streamed.headers
        refused = await replica.whole(call(COMPLETIONS, {"prompt": "a", "max_tokens": 0}))
        assert (refused.status, json.loads(refused.body)["error"]["param"]) == (400, "max_tokens")
        assert (await replica.whole(call("/health"))).status == 200
        assert replica.fault() is None


async def test_messages_come_as_the_app_sends_them_and_a_caller_that_leaves_frees_its_seat() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97]] * 50, gate=gate)) as server:
        replica = Replica(server.app, server.engine)
        wish = call(COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 50})
        async with contextlib.aclosing(replica.answer(wish)) as batches:
            assert await anext(batches) == []  # taken
            gate.step()  # one group, and no more: what follows came while the engine waits
            found: list[Message] = []
            async with asyncio.timeout(10):
                while len(found) < 2:
                    found += await anext(batches)
            assert [message["type"] for message in found] == ["http.response.start", "http.response.body"]
            assert found[1]["body"].startswith(b"data: ")
        gate.set()
        await until(lambda: server.metric("request_success_total", finished_reason="abort") == 1)


async def test_an_engine_that_died_is_a_fault() -> None:
    async with serving(runner=ByChoice([[97]] * 9, fail_at_step=1)) as server:
        replica = Replica(server.app, server.engine)
        failed = await replica.whole(call(COMPLETIONS, {"prompt": "a"}))
        assert json.loads(failed.body)["error"]["code"] == "engine_unavailable"
        assert "engine is dead" in (replica.fault() or "")
