"""How late the event loop is: what holds it up holds up every stream and probe of the server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

_EVERY = 0.1  # seconds


async def watch_loop(observe: Callable[[float], None]) -> None:
    """Tell, for ever, how many seconds later than it asked a task was woken.

    Of the tasks, too, that were not there while the loop was held up: a long stop is as many late ones as fit in it, or
    quantiles would hardly see it.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _EVERY
        await asyncio.sleep(_EVERY)
        late = max(0.0, loop.time() - due)
        observe(late)
        for missed in range(1, math.ceil(late / _EVERY)):
            observe(late - missed * _EVERY)
