"""What one connection may take of the server: uvicorn's protocol with deadlines and a limit. It knows no route.

uvicorn bounds the size of a request's head (16 KiB, else 400) and the time between requests. Here are bounded: how many
connections are open, how long a request takes to arrive, and how long a client may leave unread what it was sent.
"""

from __future__ import annotations

import asyncio
import logging
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

_OTHER_FILES = 256  # that the process has open beside its connections
_GRACE_SECONDS = 1.0  # in which the application may answer a slow body itself


def bounded_protocol(max_connections: int, client_seconds: float) -> type[H11Protocol]:
    """A protocol for uvicorn.Config(http=...).

    Connections beyond max_connections are answered 503 and closed. A request that has not arrived client_seconds after
    it began (or after its connection did) is answered 408 and closed. A connection whose client reads nothing of what
    it is sent for as long is closed without an answer.
    """

    class Bounded(H11Protocol):
        _receiving: asyncio.TimerHandle | None = None
        _sending: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                logger.warning("A connection was refused: %d are open (max_connections).", max_connections)
                self._refuse(b"503 Service Unavailable", "Too many connections are open: try again later.", retry=True)
            else:
                self._watch_receiving()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_receiving()
            self._stop_sending()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_receiving()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_sending()

        def resume_writing(self) -> None:
            self._stop_sending()
            super().resume_writing()

        def _watch_sending(self) -> None:
            unsent = self.transport.get_write_buffer_size()

            def check() -> None:
                if self.transport.get_write_buffer_size() < unsent:  # a slow reader, but one
                    self._watch_sending()
                else:
                    self.transport.abort()

            self._sending = self.loop.call_later(client_seconds, check)

        def _watch_receiving(self) -> None:
            """From a request's first byte until its last one."""
            if self.transport.is_closing() or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._stop_receiving()
            elif self._receiving is None:
                seconds = client_seconds + _GRACE_SECONDS
                self._receiving = self.loop.call_later(seconds, self._came_too_slowly)

        def _stop_receiving(self) -> None:
            if self._receiving is not None:
                self._receiving.cancel()
                self._receiving = None

        def _stop_sending(self) -> None:
            if self._sending is not None:
                self._sending.cancel()
                self._sending = None

        def _came_too_slowly(self) -> None:
            if self.conn.their_state is h11.IDLE:
                self._refuse(b"408 Request Timeout", "The request took too long to arrive.", retry=False)
            else:  # its answer was given already, or it is what nobody reads
                self.transport.abort()

        def _refuse(self, status: bytes, message: str, *, retry: bool) -> None:
            kind = b"service_unavailable" if retry else b"invalid_request_error"
            body = b'{"error": {"message": "%s", "type": "%s", "param": null, "code": null}}' % (message.encode(), kind)
            head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n"
            self.transport.write(head % (status, len(body)) + b"Retry-After: 5\r\n" * retry + b"\r\n" + body)
            self.transport.close()

    return Bounded


def allow_open_files(max_connections: int) -> None:
    """Raise this process's limit of open files so far that it holds the connections; warn where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "This process may open %d files only: max_connections %d needs %d. Raise `ulimit -n`, or lower it.",
            allowed,
            max_connections,
            needed,
        )
