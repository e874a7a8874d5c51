"""The HTTP server on a scripted engine: in-process for answers, on a real port for bytes and disconnects."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from fake_engines import fake_engine
from fakes import ByteTokenizer, ScriptedRunner
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from hamburger.engine.types.sampling_params import SamplingParams, ThinkingBudget
from hamburger.server.api.auth import ApiKeys
from hamburger.server.app import create_app_of, model_context
from hamburger.server.config import ServeSettings
from hamburger.server.operation.metrics import ServerMetrics
from hamburger.server.operation.rotation import Certificate, certificate_of
from hamburger.server.operation.tracing import RequestTraces
from hamburger.server.responses.store import ResponseStore
from hamburger.server.serve import uvicorn_config
from quick_server import QuickServer

MODEL = "burger"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def split(text: str, *sizes: int) -> list[list[int]]:
    """The bytes of `text` as groups of these sizes."""
    data, groups = list(text.encode()), []
    for size in sizes:
        groups.append(data[:size])
        data = data[size:]
    if data:
        raise ValueError(f"{len(data)} bytes are left")
    return groups


class ByChoice(ScriptedRunner):
    """Scripts by choice index (the end of the server's request ids); the last one serves all further choices."""

    def __init__(self, *by_choice: list[list[int]], **options: Any) -> None:
        super().__init__(**options)
        self.by_choice = by_choice
        self.confidences: list[float | None] = []
        self.seeds: list[int | None] = []
        self.prompts: list[list[int]] = []
        self.budgets: list[ThinkingBudget | None] = []
        self.params: list[SamplingParams] = []

    def script(self, sequence: Sequence) -> list[int]:
        if not sequence.groups:
            self.confidences.append(sequence.params.confidence)
            self.seeds.append(sequence.params.seed)
            self.prompts.append(sequence.prompt_ids)
            self.budgets.append(sequence.params.thinking)
            self.params.append(sequence.params)
        if self.by_choice:
            index = int(sequence.request_id.rsplit("-", 1)[1])
            self.scripts[sequence.request_id] = self.by_choice[min(index, len(self.by_choice) - 1)]
        return super().script(sequence)


@dataclass
class Served:
    """A server in this event loop. `runner` shows what the engine was asked."""

    app: FastAPI
    engine: AsyncEngine
    runner: ByChoice
    metrics: ServerMetrics
    client: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def chat(self, **fields: Any) -> dict[str, Any]:
        return await self.ok(CHAT, {"messages": HELLO, **fields})

    async def complete(self, **fields: Any) -> dict[str, Any]:
        return await self.ok(COMPLETIONS, {"prompt": "ab", **fields})

    async def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """All events of a streamed answer, which must end with [DONE]."""
        prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "ab"}
        response = await self.post(path, {**prompt, "stream": True, **fields})
        assert response.status_code == 200, response.text
        return events(response.text)

    async def ok(self, path: str, body: Any) -> dict[str, Any]:
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def refused(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that fails, in the one shape."""
        response = await self.post(path, body, **options)
        return response.status_code, error_of(response)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of /metrics that have these labels."""
        values = list[float]()
        for line in self.metrics.render().decode().splitlines():
            head, _, value = line.rpartition(" ")
            found, _, rest = head.partition("{")
            if found == f"hamburger_{name}" and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                values.append(float(value))
        if not values:
            raise KeyError(name)
        return sum(values)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of an SSE body; each event is one data line, the last one is [DONE]."""
    assert "\r" not in text
    *lines, rest = text.split("\n\n")
    assert rest == ""
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def typed_events(text: str) -> list[dict[str, Any]]:
    """The JSON of an SSE body whose events have types, which are their names."""
    found: list[dict[str, Any]] = []
    for event in text.rstrip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def groups_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a stream with return_groups shows of its groups."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["group"] for choice in choices if "group" in choice]


@asynccontextmanager
async def serving(
    *by_choice: list[list[int]],
    runner: ByChoice | None = None,
    settings: dict[str, Any] | None = None,
    tokenizer: ByteTokenizer | None = None,
    traces: RequestTraces | None = None,
    sampling_defaults: SamplingDefaults = OPENAI_DEFAULTS,
    keys: ApiKeys | None = None,
    **engine: Any,
) -> AsyncIterator[Served]:
    """A server whose choices follow scripts. `engine` are fields of EngineConfig (and `info`), see fake_engines.py."""
    runner = runner or ByChoice(*by_choice)
    metrics = ServerMetrics(MODEL)
    async with fake_engine(runner, observer=metrics, tokenizer=tokenizer, **engine) as launched:
        given = ServeSettings(**(settings or {}))
        context = model_context(launched, tokenizer or ByteTokenizer(), metrics, given, MODEL, sampling_defaults)
        responses = ResponseStore(given.response_store, given.response_file)
        app = create_app_of([context], given, responses, traces, keys)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield Served(app, launched, runner, metrics, client)
        responses.close()
        context.close()


@asynccontextmanager
async def on_port(
    app: FastAPI, *, on: int = 0, certificate: Certificate | None = None, **settings: Any
) -> AsyncIterator[int]:
    """The app on a real port of this machine (0: a free one), as the command serves it with these settings."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", on))
        state = getattr(app, "state", None)  # a bare ASGI application has none
        count, given = getattr(state, "count_refusal", lambda *error: None), ServeSettings(**settings)
        config = uvicorn_config(app, given, count, certificate or certificate_of(given))
        config.timeout_graceful_shutdown = 1
        server = QuickServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        port: int = listener.getsockname()[1]
        yield port
        server.should_exit = True
        await task


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds; fails after 10 s."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.002)
