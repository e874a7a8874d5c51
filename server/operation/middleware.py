"""What wraps every request: its id, headers for browsers, and its line in the log. Pure ASGI, so streams stream."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hamburger.server.operation.request_log import RequestEntry, open_entry, write_entry
from hamburger.server.operation.tracing import RequestTraces

REQUEST_ID = "X-Request-Id"
_SAME = "Request-Id"  # as Anthropic's clients know it
RATE_LIMITS = tuple(f"X-RateLimit-{name}-Tokens" for name in ("Limit", "Remaining", "Reset"))  # key_limits.py's
_SCHEMES = ("http", "https", b"http", b"https")
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
# An answer is what its type says, never shown inside somebody's page, and kept by no cache.
_SAFE_HEADERS = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-store"}


class RequestIds:
    """Answers each request with its X-Request-Id: the client's own, if it sent a usable one, else a new one.

    logs: write one line about each request when it has ended (request_log.py). traces: what makes its spans.
    """

    def __init__(self, app: ASGIApp, logs: bool = True, traces: RequestTraces | None = None) -> None:
        self._app = app
        self._logs, self._traces = logs, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _leave_host_out(scope)
        asked = Headers(scope=scope)
        given = asked.get(REQUEST_ID, "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        entry = open_entry(scope, request_id)

        async def noted_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not entry.has_ended:
                entry.client_left = True
            return message

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = headers[_SAME] = request_id
                if "transfer-encoding" in asked and "content-length" in asked:  # RFC 9112, 6.1
                    headers["Connection"] = "close"
                _make_safe(headers)
            else:
                entry.bytes += len(message.get("body", b""))
                # Before it is sent: a server says "disconnect" as soon as the last byte has left.
                entry.has_ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, noted_receive, noted_send)
        except Exception:
            entry.status = 500
            raise
        finally:
            if entry.goes_on is None:
                self._write(entry, scope)
            else:
                entry.goes_on.add_done_callback(lambda _: self._write(entry, scope))

    def _write(self, entry: RequestEntry, scope: Scope) -> None:
        if self._logs:
            write_entry(entry, scope)
        if self._traces is not None:
            self._traces.add(entry, scope)


def _leave_host_out(scope: Scope) -> None:
    """Of a target in absolute form, as proxies send it (RFC 9112, 3.2.2): what counts is the path."""
    for name, scheme, slash in (("path", "://", "/"), ("raw_path", b"://", b"/")):
        target = scope.get(name)
        if target and not target.startswith(slash) and target.partition(scheme)[0].lower() in _SCHEMES:
            _, found, rest = target.partition(scheme)[2].partition(slash)
            scope[name] = found + rest or slash


class SafeHeaders:
    """What RequestIds says to browsers, for an application whose requests are named by the server in front of it: by
    that name its errors call them, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "") if scope["type"] == "http" else ""
        if _USABLE_ID.fullmatch(given):
            open_entry(scope, given)

        async def safe_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if _USABLE_ID.fullmatch(given):
                    headers.setdefault(_SAME, given)
                _make_safe(headers)
            await send(message)

        await self._app(scope, receive, safe_send)


def _make_safe(headers: MutableHeaders) -> None:
    for name, value in _SAFE_HEADERS.items():
        headers.setdefault(name, value)


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Let web pages of these origins ask the application, and read the headers that clients go by."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After", *RATE_LIMITS],
        )
