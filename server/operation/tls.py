"""TLS in front of uvicorn's protocol: a connection counts, and has its time, from before its handshake. No HTTP.

asyncio tells a server of a TLS connection when the handshake is over: who begins none would be counted by nobody.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from hamburger.server.operation.connections import PROBE_PLACES, PROBE_SECONDS
from hamburger.server.operation.seldom import Seldom

logger = logging.getLogger(__name__)


def tls_protocol(
    http: type[H11Protocol],
    context: Callable[[], ssl.SSLContext],
    max_connections: int,
    client_seconds: float,
    on_refusal: Callable[[int, str | None], None],
) -> type[asyncio.Protocol]:
    """A protocol for uvicorn.Config(http=...), whose listeners know nothing of TLS: after the handshake it is `http`.

    context: gives that of a handshake which begins now.
    Connections beyond max_connections and the places of probes (connections.py) are closed: nothing that they could
    read can be said before the handshake. So are those whose handshake takes longer than client_seconds; beyond
    max_connections PROBE_SECONDS.
    """
    seldom = Seldom(logger)

    class Handshake(asyncio.Protocol):
        transport: asyncio.Transport

        def __init__(self, server_state: ServerState, **settings: Any) -> None:
            self._create = partial(http, server_state=server_state, **settings)
            self._open = cast("set[Any]", server_state.connections)  # uvicorn closes all of them when it ends
            self._early = bytearray()  # what came right behind the handshake

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast("asyncio.Transport", transport)
            self._is_beyond = len(self._open) >= max_connections
            if len(self._open) >= max_connections + PROBE_PLACES:
                self._refuse()
                return
            self._open.add(self)
            self._task = asyncio.get_running_loop().create_task(self._shake_hands())

        def _refuse(self) -> None:
            seldom.warn("A connection was refused: %d are open (max_connections).", max_connections)
            on_refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections")
            self.transport.abort()

        def data_received(self, data: bytes) -> None:
            self._early += data

        def shutdown(self) -> None:
            """As uvicorn asks of its protocols: the server ends."""
            self.transport.abort()

        async def _shake_hands(self) -> None:
            seconds = min(client_seconds, PROBE_SECONDS) if self._is_beyond else client_seconds
            try:
                secured = await asyncio.get_running_loop().start_tls(
                    self.transport, self, context(), server_side=True, ssl_handshake_timeout=seconds
                )
            except OSError:  # of the client, or its time is over; it is closed
                secured = None
            finally:
                self._open.discard(self)
            if secured is None:  # it was aborted
                if self._is_beyond:
                    self._refuse()
                return
            protocol = self._create()
            secured.set_protocol(protocol)
            protocol.connection_made(secured)
            if self._early:
                protocol.data_received(bytes(self._early))

    return Handshake
