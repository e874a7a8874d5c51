"""What one connection may take of the server: uvicorn's protocol with deadlines and a limit. It knows no route.

uvicorn bounds the size of a request's head (16 KiB, else 400) and the time between requests. Here are bounded: how many
connections are open, how long a request takes to arrive, and how long a client may leave unread what it was sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from hamburger.server.operation.direct_body import OffersDirectBody
from hamburger.server.operation.request_log import note_cut
from hamburger.server.operation.seldom import Seldom

logger = logging.getLogger(__name__)

_FIRST_PROBE_SECONDS, _PROBE_SECONDS = 0.05, 1.0  # between signs to a client that has ended its side
_READ_BYTES = 1 << 12  # at once: of a body in chunks of one byte 700, which take 8 ms in which nobody has a turn
_MOST_WAITING_BYTES = 1 << 16  # of requests behind one that is not answered yet
_GRACE_SECONDS = 1.0  # in which the application may answer a slow body itself
# Who watches the server must not take a crowded one for a dead one: places beyond max_connections, for a moment each.
PROBE_PLACES, PROBE_SECONDS = 8, 2.0
_PROBE = re.compile(rb"(GET|HEAD) /(health|ready|metrics)[ ?]")  # as a connection begins, in one packet


def bounded_protocol(
    max_connections: int, client_seconds: float, on_refusal: Callable[[int, str | None], None]
) -> type[H11Protocol]:
    """A protocol for uvicorn.Config(http=...). on_refusal: told the status and code of errors that no route knows of.

    Connections beyond max_connections are answered 503 and closed, but for some that ask for the server's state within
    moments, and once. A request has client_seconds for its head, from its first byte on, and as long again for its
    body; one that takes longer is answered 408 and closed, and so is a new connection that sends nothing. A connection
    whose client reads nothing of what it is sent for as long is closed without an answer. What is no HTTP is a 400 in
    the API's shape.

    A client that ends its side of the connection after a whole request, and before its answer begins, still gets it.
    One that has left altogether looks the same until it is sent something: so it is, a 102 (RFC 2518), soon another,
    whose failing tells, and then one each second. HTTP/1.0 knows no 102: who ends its side there has left, as proxies
    mean it that speak it by default.
    """

    seldom = Seldom(logger)

    class BoundedProtocol(H11Protocol):
        _timed: tuple[object, ...] | None = None  # what the timer below is for
        _receive_timer: asyncio.TimerHandle | None = None
        _send_timer: asyncio.TimerHandle | None = None
        _probe_timer: asyncio.TimerHandle | None = None
        _is_half_closed = False
        _has_sent = False
        _only_probes = False  # it is beyond the limit

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.app = OffersDirectBody(self.app)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if hasattr(transport, "max_size"):  # asyncio's own, of 256 KiB
                transport.max_size = _READ_BYTES
            self._only_probes = len(self.connections) > max_connections
            if len(self.connections) > max_connections + PROBE_PLACES:
                self._refuse_one_too_many()
            else:
                self._time_receiving()

        def _refuse_one_too_many(self) -> None:
            seldom.warn("A connection was refused: %d are open (max_connections).", max_connections)
            message = "Too many connections are open: try again later."
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, message, "too_many_connections")

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_receive_timer()
            self._stop_send_timer()
            if self._probe_timer is not None:
                self._probe_timer.cancel()
            super().connection_lost(exc)

        def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own: whether to go on
            cycle = self.cycle
            if cycle is None or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
                return False
            if cycle.response_started and not self.conn.trailing_data[0]:  # else another request waits behind it
                return False
            if cycle.scope["http_version"] == "1.0":
                return False
            if self.transport.get_extra_info("sslcontext") is not None:  # asyncio has no half of a TLS connection
                return False
            self._is_half_closed = True
            self._probe(_FIRST_PROBE_SECONDS)
            return True

        def _probe(self, pause: float = _PROBE_SECONDS) -> None:
            if self.cycle is not None and not self.cycle.response_started and not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
                self._probe_timer = self.loop.call_later(pause, self._probe)

        def _unsupported_upgrade_warning(self) -> None:
            """Clients that offer HTTP/2 are served as they are, and need no line in the log, or WebSockets."""

        def on_response_complete(self) -> None:
            if self._only_probes:
                self.transport.close()
            super().on_response_complete()
            if not self._is_half_closed:
                return
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()
            else:  # that of the next request
                self._probe(_FIRST_PROBE_SECONDS)

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
                self._note_cut(HTTPStatus.BAD_REQUEST)
                self.transport.close()
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, "This is no HTTP/1.1 request that can be read.")

        def data_received(self, data: bytes) -> None:
            if self._only_probes and not self._has_sent and _PROBE.match(data) is None:
                self._refuse_one_too_many()
                return
            self._has_sent = True
            super().data_received(data)
            self._read_on()
            self._time_receiving()

        def _read_on(self) -> None:
            """Behind a request that is whole, uvicorn reads no further until its answer is: it would not see a client
            leave that has begun another one."""
            waiting = self.conn.trailing_data[0]
            if self.conn.their_state is h11.DONE and 0 < len(waiting) <= _MOST_WAITING_BYTES:
                self.flow.resume_reading()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_send_timer()

        def resume_writing(self) -> None:
            self._stop_send_timer()
            super().resume_writing()

        def _start_send_timer(self) -> None:
            unsent = self.transport.get_write_buffer_size()

            def abort_unless_reading() -> None:
                if self.transport.get_write_buffer_size() < unsent:  # a slow reader, but one
                    self._start_send_timer()
                else:
                    self._abort_slow()

            self._send_timer = self.loop.call_later(client_seconds, abort_unless_reading)

        def _time_receiving(self) -> None:
            """Each has a time of its own: the wait for a connection's first byte, a request's head, and its body."""
            state = self.conn.their_state
            if self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY):
                self._stop_receive_timer()
            elif self._timed != (now := (state, self.cycle, self._has_sent)):  # a cycle is one request
                self._stop_receive_timer()
                self._timed = now
                seconds = PROBE_SECONDS if self._only_probes else client_seconds + _GRACE_SECONDS
                self._receive_timer = self.loop.call_later(seconds, self._came_too_slowly)

        def _stop_receive_timer(self) -> None:
            self._timed = None
            if self._receive_timer is not None:
                self._receive_timer.cancel()
                self._receive_timer = None

        def _stop_send_timer(self) -> None:
            if self._send_timer is not None:
                self._send_timer.cancel()
                self._send_timer = None

        def _came_too_slowly(self) -> None:
            if self._only_probes and not self._has_sent:
                self._refuse_one_too_many()
            elif self.conn.their_state is h11.IDLE or not self.cycle.response_started:
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, "The request took too long to arrive.")
            else:  # its answer was given already, or is being given: its body is what nobody reads
                self._abort_slow()

        def _abort_slow(self) -> None:
            self._note_cut(HTTPStatus.REQUEST_TIMEOUT)
            self.transport.abort()

        def _note_cut(self, status: HTTPStatus) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                note_cut(cast(Scope, self.cycle.scope), status)

        def _refuse(self, status: HTTPStatus, message: str, code: str | None = None) -> None:
            self._note_cut(status)
            self._stop_receive_timer()
            kind = "service_unavailable" if status == HTTPStatus.SERVICE_UNAVAILABLE else "invalid_request_error"
            error = {"message": message, "type": kind, "param": None, "code": code}
            body = json.dumps({"error": error}).encode()
            head = b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n"
            again = b"Retry-After: 5\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else b""
            self.transport.write(head % (status, status.phrase.encode(), len(body)) + again + b"\r\n" + body)
            self.transport.close()
            if self._has_sent or code is not None:  # browsers and load balancers open some that they do not use
                on_refusal(status, code)

    return BoundedProtocol
