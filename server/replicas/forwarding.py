"""The front of several replicas: one HTTP surface, each request sent to one of them, and again if that one is lost.

    request -> read whole -> affinity key -> replica -> its messages, as they are
                                  ^             |
                                  '--- lost before its first byte: the next one

Until the first byte has left, a lost replica costs time and nothing else: generating has no effects. Afterwards a
stream ends as it does when an engine dies, with an error event. Knows no engine for scaling out (no ray) and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from hamburger.engine.types.errors import EngineUnavailable, QueueTimeout
from hamburger.server.api.auth import ApiKeys, require_api_key
from hamburger.server.api.errors import ApiError, add_error_handlers, error_body, route_path, to_api_error
from hamburger.server.api.events import DONE, data_event, typed_event
from hamburger.server.api.origins import check_origin
from hamburger.server.api.request_body import read_whole
from hamburger.server.api.streaming import unless_client_leaves
from hamburger.server.config import ServeSettings
from hamburger.server.messages.errors import PATH as MESSAGES
from hamburger.server.messages.errors import messages_error
from hamburger.server.operation.middleware import REQUEST_ID, SafeHeaders, allow_origins
from hamburger.server.operation.request_log import CLIENT_LEFT
from hamburger.server.replicas.affinity import affinity_key
from hamburger.server.replicas.replica import WholeRequest, WholeResponse
from hamburger.server.replicas.scale_options import ScaleOptions
from hamburger.server.responses.errors import PATH as RESPONSES
from hamburger.server.responses.errors import failed_event, responses_error

logger = logging.getLogger(__name__)
_FIRST_PAUSE = 0.1  # seconds before a request is sent again; doubled each time
_FULL_PAUSE = 0.1  # seconds before one that no replica took is offered again
_ASK_SECONDS = 10.0
_RETRY_SECONDS = 5  # the Retry-After of a request that nobody took
_ASKED_OF_ALL = ("/metrics", "/health", "/ready")


class ReplicaLost(Exception):
    """A replica went away before its answer had ended."""


class _ReplicaFull(Exception):
    """A replica did not take the call."""


class Replicas(Protocol):
    """What sends calls to replicas."""

    def send(self, call: WholeRequest, key: str | None) -> AsyncGenerator[list[Message]]:
        """Replica.answer of one of them, the same for the same key while it can be, of the one that a key names
        (affinity.NAMED) while it is there; nothing from one that is full. Raises ReplicaLost or QueueFull."""

    async def ask_all(self, call: WholeRequest) -> list[WholeResponse]:
        """Replica.whole of each that can be reached; waits for no free place. May raise ReplicaLost if none can."""


def create_front(replicas: Replicas, options: ScaleOptions, settings: ServeSettings) -> FastAPI:
    """The application that answers for `replicas`, which are to be given `replica_settings`.

    The one X-Request-Id of an answer is left to the HTTP server in front, which names requests itself.
    """
    app = FastAPI(openapi_url=None)  # the documents are the replicas', like everything else
    add_error_handlers(app, lambda scope, status: None, {MESSAGES: messages_error})
    app.router.routes.append(Route("/{path:path}", _Forwarder(replicas, options, settings)))
    allow_origins(app, settings.cors_origin)
    app.add_middleware(SafeHeaders)
    return app


def replica_settings(settings: ServeSettings) -> ServeSettings:
    """Those of a replica behind a front, which answers web pages of other origins itself, and has a replica without an
    engine replaced."""
    return settings.model_copy(update={"cors_origin": [], "engine_restarts": 0})


class _Forwarder:
    def __init__(self, replicas: Replicas, options: ScaleOptions, settings: ServeSettings) -> None:
        self._replicas, self._options, self._settings = replicas, options, settings
        self._check_key = require_api_key(ApiKeys(settings.api_keys()))
        self._wait_seconds = settings.engine_args().max_queue_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method == "POST":
            check_origin(request.headers, self._settings.cors_origin)
        path = route_path(scope)
        if request.method == "POST" or path.startswith("/v1/"):
            await self._check_key(request)  # before its body is read, and before it takes anyone's place
        call = WholeRequest.of(scope, await read_whole(request, self._settings))  # what is too large, a replica refuses
        if request.method == "GET" and path in _ASKED_OF_ALL:
            await _response(path, await self._ask_all(call))(scope, receive, send)
            return
        answer = _OutgoingAnswer(send, path)
        try:
            await unless_client_leaves(receive, self._forward(call, answer))
        except ApiError as error:
            if error.status != CLIENT_LEFT or not answer.has_begun:
                raise

    async def _forward(self, call: WholeRequest, answer: _OutgoingAnswer) -> None:
        headers = Headers(raw=call.scope["headers"])
        key = affinity_key(route_path(call.scope), headers, call.body, self._options.affinity)
        deadline = time.monotonic() + self._wait_seconds
        for attempt in range(self._options.retries + 1):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            # A lost replica may still be listed: another key does not insist on it.
            attempt_key = key if key is None or not attempt else f"{key}/{attempt}"
            try:
                await self._until_taken(call, attempt_key, answer, deadline)
                return
            except ReplicaLost as lost:
                logger.warning("Replica lost (attempt %d of %d): %s", attempt + 1, self._options.retries + 1, lost)
                if answer.has_begun:
                    await answer.break_off(EngineUnavailable("The replica that wrote this answer was lost."))
                    return
        raise EngineUnavailable(f"The request was given to {self._options.retries + 1} replicas, and each was lost.")

    async def _until_taken(self, call: WholeRequest, key: str | None, answer: _OutgoingAnswer, deadline: float) -> None:
        """Raises as _attempt does, but waits for full replicas."""
        while True:
            try:
                await self._attempt(call, key, answer, deadline)
                return
            except _ReplicaFull:
                if time.monotonic() > deadline:
                    raise self._queue_timeout() from None
                await asyncio.sleep(_FULL_PAUSE)

    async def _attempt(self, call: WholeRequest, key: str | None, answer: _OutgoingAnswer, deadline: float) -> None:
        """Raises ReplicaLost, _ReplicaFull or QueueTimeout; what was not begun then can be sent again."""
        async with contextlib.aclosing(self._replicas.send(call, key)) as batches:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await anext(batches)  # it was taken
            except TimeoutError as error:
                raise self._queue_timeout() from error
            except StopAsyncIteration as error:
                raise _ReplicaFull from error
            answer.forget()
            async for batch in batches:
                for message in batch:
                    await answer.take(message)
        if not answer.has_ended:
            raise ReplicaLost("its answer has no end")

    def _queue_timeout(self) -> QueueTimeout:
        return QueueTimeout(f"No replica took the request within {self._wait_seconds:g} s.", _RETRY_SECONDS)

    async def _ask_all(self, call: WholeRequest) -> list[WholeResponse]:
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                answers = await self._replicas.ask_all(call)
        except (ReplicaLost, TimeoutError):
            answers = []
        if not answers:
            raise EngineUnavailable("No replica answers.")
        return answers


class _OutgoingAnswer:
    """An answer on its way out. Nothing of it leaves before its head and the first piece of its body are there."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self._head: Message | None = None
        self._first = self._last = b""  # pieces of its body that hold events
        self.has_begun = self.has_ended = False

    def forget(self) -> None:
        """What was kept of an attempt before this one."""
        self._head = None

    async def take(self, message: Message) -> None:
        """Raises ReplicaLost for the answer of a replica whose engine is gone, if nothing has left yet."""
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message["headers"] if name.lower() != _REQUEST_ID]
            self._head = {**message, "headers": headers}
            return
        if not self.has_begun:
            if self._head is None:
                raise ReplicaLost("its answer has no head")
            if self._head["status"] == 503 and _code(message.get("body", b"")) == "engine_unavailable":
                raise ReplicaLost("its engine is not available")
            self.has_begun = True
            await self._send(self._head)
        self.has_ended = not message.get("more_body", False)
        if _DATA in (body := message.get("body", b"")):
            self._first, self._last = self._first or body, body
        await self._send(message)

    async def break_off(self, error: EngineUnavailable) -> None:
        """End a stream of events as one ends whose engine died. Raises `error` where the body is no such stream."""
        if not Headers(raw=self._head["headers"] if self._head else []).get("content-type", "").startswith(_EVENTS):
            raise error
        body = _broken_off(self._path, to_api_error(error), self._first, self._last)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _broken_off(path: str, error: ApiError, first: bytes, last: bytes) -> bytes:
    """What a stream of that endpoint ends with, whose first and last events are these."""
    if path.startswith(MESSAGES):
        return typed_event(messages_error(error))
    if path.startswith(RESPONSES):
        begun, told = _values(first), _values(last)
        number = told[-1]["sequence_number"] + 1 if told else 0
        ends = [responses_error(error, number)]
        if begun:
            ends.append(failed_event(begun[0]["response"], error, number + 1))
        return b"".join(map(typed_event, ends))
    return data_event(error_body(error)) + DONE


def _values(events: bytes) -> list[Any]:
    return [from_json(line.removeprefix(_DATA)) for line in events.splitlines() if line.startswith(_DATA)]


_REQUEST_ID = REQUEST_ID.lower().encode()
_EVENTS, _DATA = "text/event-stream", b"data: "


def _code(body: bytes) -> str | None:
    """The code of an error's body."""
    try:
        code = from_json(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None


def _response(path: str, answers: Sequence[WholeResponse]) -> Response:
    """One for all: the metrics of each, or the best state of any."""
    answers = sorted(answers, key=lambda answer: answer.status)
    if path == "/metrics":
        answer = answers[-1]  # a refusal, if there is one
        body = merge_pages([a.body.decode() for a in answers]).encode() if answer.status == 200 else answer.body
    else:
        answer = answers[0]
        body = answer.body
    left_out = (b"content-length", _REQUEST_ID)
    headers = {name.decode(): value.decode() for name, value in answer.headers if name.lower() not in left_out}
    return Response(body, answer.status, headers)


def merge_pages(pages: Sequence[str]) -> str:
    """Pages of Prometheus text as one, each family once; a label must tell their samples apart."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for page in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith("# "):  # HELP or TYPE, then the name
                name = line.split(" ", 3)[2]
                head, _ = families.setdefault(name, ([], []))
                if line not in head:
                    head.append(line)
            else:
                families.setdefault(name, ([], []))[1].append(line)
    return "".join(f"{line}\n" for head, samples in families.values() for line in [*head, *samples])
