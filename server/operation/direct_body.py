"""DirectBody: the next bytes of a streamed answer without a coroutine, for what an event loop's callback has to send.

ASGI's `send` is awaited: who learns in a callback what is to be sent wakes a task, which comes a round of the loop
later and passes it through each layer of the application. Here it goes straight to the connection.
"""

from __future__ import annotations

from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_EXTENSION = "hamburger.direct_body"  # of the scope (ASGI: servers may offer more than it says)


class DirectBody:
    """Of an HTTP/1.1 answer whose length was not told (RFC 9112, 7.1: it is sent in chunks). `send` begins and ends it,
    and may be used between."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether the answer has begun and its client takes more at once. Where not, `send` waits for that, or knows
        that it has left."""
        cycle = self._cycle
        begun, over = cycle.response_started, cycle.response_complete or cycle.disconnected
        return begun and not over and not cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        """Only while it is ready."""
        if body:  # an empty chunk would be the last
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def direct_body_of(scope: Scope) -> DirectBody | None:
    """None where the server offers none."""
    return cast("DirectBody | None", scope.get("extensions", {}).get(_EXTENSION))


class OffersDirectBody:
    """An application to which the server's own protocol gives requests, and the DirectBody of each with them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        if isinstance(cycle, RequestResponseCycle) and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope.setdefault("extensions", {})[_EXTENSION] = DirectBody(cycle)
        await self._app(scope, receive, send)
