"""LongTexts: texts that take long to tokenize, a few at a time and beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from hamburger.server.api.streaming import unless_client_leaves

T = TypeVar("T")
_AT_ONCE = 2


class LongTexts:
    """Threads of their own: what clients send must not hold up what else waits for one, such as an engine's end."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, "hamburger-long-texts")

    async def do(self, receive: Receive, work: Callable[[], T]) -> T:
        """What `work` gives. What a client that leaves still waited for is not begun; it gets ApiError 499.

        receive: of its request, whose body has been read.
        """
        return await unless_client_leaves(receive, asyncio.get_running_loop().run_in_executor(self._threads, work))

    def close(self) -> None:
        """What waits is not done any more, so that a server need not wait for it at its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
