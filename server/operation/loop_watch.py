"""How late the event loop is: what holds it up holds up every stream and probe of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_EVERY = 0.1  # seconds


async def watch_loop(observe: Callable[[float], None]) -> None:
    """Tell, for ever, how many seconds later than it asked a task was woken."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _EVERY
        await asyncio.sleep(_EVERY)
        observe(max(0.0, loop.time() - due))
