"""LongTexts: texts that take long to tokenize, a few at a time and beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from hamburger.engine.types.errors import QueueFull
from hamburger.server.api.streaming import unless_client_leaves

T = TypeVar("T")


class LongTexts:
    """Threads of their own: what clients send must not hold up what else waits for one, such as an engine's end."""

    def __init__(self, at_once: int, most_waiting: int = 32) -> None:
        self._threads = ThreadPoolExecutor(at_once, "hamburger-long-texts")
        self._most, self._number = at_once + most_waiting, 0

    async def do(self, receive: Receive, work: Callable[[], T]) -> T:
        """What `work` gives. What a client that leaves still waited for is not begun; it gets ApiError 499.

        receive: of its request, whose body has been read. Raises QueueFull where too many wait.
        """
        if self._number >= self._most:
            raise QueueFull(f"{self._number} long texts are tokenized or wait for it: try again later.", 5)
        self._number += 1
        try:
            return await unless_client_leaves(receive, asyncio.get_running_loop().run_in_executor(self._threads, work))
        finally:
            self._number -= 1

    def close(self) -> None:
        """What waits is not done any more, so that a server need not wait for it at its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
