"""Replica: one engine with its whole HTTP surface, asked by calls instead of a port. Knows no router and no ray.

A call is a request that was read whole; its answer is the app's own ASGI messages, so that every route, header, event
and error is the one that `hamburger serve` sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.health import liveness_fault
from hamburger.server.app import create_app_of
from hamburger.server.config import ServeSettings
from hamburger.server.launch import engine_arguments, find_models, launch_model
from hamburger.server.operation.loop_watch import watch_loop
from hamburger.server.operation.metrics import ServerMetrics
from hamburger.server.responses.store import ResponseStore

logger = logging.getLogger(__name__)
_PASSED_ON = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_OF_THE_FRONT = (b"origin", b"sec-fetch-site")  # it has looked at them


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """A whole request. scope: the plain values of its ASGI scope, which can cross to another machine."""

    scope: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> WholeRequest:
        kept = {name: scope[name] for name in _PASSED_ON if name in scope}
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        kept["headers"] = [(name, value) for name, value in headers if name not in _OF_THE_FRONT]
        kept["client"] = tuple(scope["client"]) if scope.get("client") else None
        return cls(kept, body)


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """A whole response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Replica:
    """Made by `launch`, or around an app and its engine, which it then does not end."""

    def __init__(self, app: ASGIApp, engine: AsyncEngine) -> None:
        self._app, self._engine = app, engine
        self._tasks: list[asyncio.Task[None]] = []  # held here: the event loop alone would forget them

    @classmethod
    async def launch(cls, settings: ServeSettings, name: str, on_death: Callable[[], None]) -> Replica:
        """Load the model in an engine process and serve it. on_death: called once the engine is dead for good.

        name: the label `engine` of its metrics, and the end of the ids of responses that it stores. Raises what cannot
        be used: SettingsError, ConfigError, CheckpointError, TokenizerError.
        """
        [found] = await asyncio.to_thread(find_models, engine_arguments(settings))
        model = await launch_model(found, logger.info, ServerMetrics(found.name, name))
        stored = ResponseStore(settings.response_store, place=name)
        replica = cls(create_app_of([model.context], settings, stored), model.context.engine)

        async def wait_for_death() -> None:
            await model.supervision
            on_death()

        loop_watch = asyncio.create_task(watch_loop(model.context.metrics.on_loop_lag))
        replica._tasks = [asyncio.create_task(wait_for_death()), model.hang_watch, loop_watch]
        return replica

    def fault(self) -> str | None:
        """Why it should be replaced, or None."""
        return liveness_fault(self._engine.health())

    async def answer(self, call: WholeRequest) -> AsyncGenerator[list[Message]]:
        """First an empty list, which says that the call was taken; then the app's messages as they come, several at
        once where they came faster than they were taken. Closing it is what a client does that goes away."""
        yield []
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        task = asyncio.create_task(self._run(call, messages))
        try:
            while (message := await messages.get()) is not None:
                batch = [message]
                while not messages.empty() and (message := messages.get_nowait()) is not None:
                    batch.append(message)
                yield batch
                if message is None:
                    break
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def whole(self, call: WholeRequest) -> WholeResponse:
        """The answer in one piece."""
        status, headers, body = 500, [], bytearray()
        async with contextlib.aclosing(self.answer(call)) as batches:
            async for batch in batches:
                for message in batch:
                    if message["type"] == "http.response.start":
                        status, headers = message["status"], list(message["headers"])
                    else:
                        body += message.get("body", b"")
        return WholeResponse(status, headers, bytes(body))

    async def _run(self, call: WholeRequest, messages: asyncio.Queue[Message | None]) -> None:
        was_read = False

        async def receive() -> Message:
            nonlocal was_read
            if was_read:
                await asyncio.Event().wait()  # a client that goes away cancels this task
            was_read = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        try:
            await self._app({**call.scope, "asgi": {"version": "3.0", "spec_version": "2.4"}}, receive, send)
        finally:
            messages.put_nowait(None)
