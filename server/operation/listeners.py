"""The sockets that the server listens on. Bound before models are loaded, so that a port in use is told soon."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from hamburger.server.config import SettingsError

_FREE_PORT_TRIES = 8  # one that is free on the first address may be taken on another
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Bound sockets, which do not listen yet, for all addresses of the host, as a client may take any: all of one port.

    Addresses that this machine lacks are left out: `localhost` is often ::1 too where there is no IPv6. port: 0 takes a
    free one. Raises SettingsError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # the latter for what no name of a host can be
        raise SettingsError(f"host is {host!r}: {getattr(error, 'strerror', None) or error}.") from error
    addresses = [*dict.fromkeys((family, address) for family, _, _, _, address in found)]
    for tries_left in reversed(range(1 if port else _FREE_PORT_TRIES)):
        with ExitStack() as stack:
            try:
                listeners = _bind(host, port, addresses, stack)
            except SettingsError:
                if tries_left:
                    continue
                raise
            yield listeners
            return


def _bind(
    host: str, port: int, addresses: Sequence[tuple[socket.AddressFamily, tuple[Any, ...]]], stack: ExitStack
) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    for family, address in addresses:
        try:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and len(addresses) > 1:  # else :: takes all of IPv4 too
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
        except OSError as error:
            if error.errno in _NOT_HERE and (listeners or (family, address) != addresses[-1]):
                continue
            where = host if address[0] == host else f"{host} ({address[0]})"
            reason = error.strerror or str(error)
            remedy = (
                "Give an address of this machine as --host" if error.errno in _NOT_HERE else "Choose another --port"
            )
            raise SettingsError(f"cannot listen on {where} port {port}: {reason}. {remedy}.") from error
        port = listener.getsockname()[1]
        listeners.append(listener)
    return listeners
