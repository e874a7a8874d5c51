"""How many files the server's process may open: room for its connections, and what is told where there is none left.

The event loop accepts up to ACCEPTED_AT_ONCE connections of a listener in one round, and closes those too many a few
rounds later: so many are open beside the ones that count. Who waits to be accepted waits in the kernel, and takes no
file of this process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Callable
from typing import Any

from hamburger.server.operation.seldom import Seldom

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64  # of one listener, in one round of the event loop
_ROUNDS = 4  # from the one that accepts a connection to the one that has closed it
_OTHER_OPEN_FILES = 256  # which the process has open beside its connections
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def allow_open_files(max_connections: int, num_listeners: int) -> int:
    """Raise this process's limit of open files so far that it holds the connections. Where that is not allowed: warn.

    Returns how many connections there is room for. With more, requests could not open what they need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    beside = num_listeners * ACCEPTED_AT_ONCE * _ROUNDS + _OTHER_OPEN_FILES
    needed = max_connections + beside
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return max_connections
    room = max(1, allowed - beside)
    logger.warning(
        "This process may open %d files only, enough for %d connections: max_connections %d needs %d. Raise "
        "`ulimit -n`, or lower it.",
        allowed,
        room,
        max_connections,
        needed,
    )
    return room


def tells_of_no_room() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler for an event loop: a connection that could not be accepted, as no file could be opened, is
    one line, now and then. asyncio would write a traceback for each, and be busy with nothing else. It tries again.
    """
    seldom = Seldom(logger)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError) and error.errno in _NO_ROOM:
            seldom.warn("Connections wait, as none can be accepted: %s. Raise `ulimit -n`.", error.strerror)
        else:
            loop.default_exception_handler(context)

    return handle
