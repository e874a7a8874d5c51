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
    """Threads of their own: what clients send must not hold up what else waits for one, such as an engine's end.

    at_once: threads. most_characters: of all texts that are tokenized or wait for it.
    """

    def __init__(self, at_once: int, most_characters: int = 32_000_000) -> None:
        self._threads = ThreadPoolExecutor(at_once, "hamburger-long-texts")
        self._most, self._characters = most_characters, 0

    async def do(self, receive: Receive, work: Callable[[], T], characters: int) -> T:
        """What `work` gives, of a text of so many. What a client that leaves still waited for is not begun; it gets
        ApiError 499.

        receive: of its request, whose body has been read. Raises QueueFull where too much waits.
        """
        if self._characters and self._characters + characters > self._most:
            message = f"{self._characters:,} characters of long texts are tokenized or wait for it: try again later."
            raise QueueFull(message, 5)
        held = [work]  # emptied where the client leaves: what waits in the executor's queue stays there
        self._characters += characters
        try:
            done = asyncio.get_running_loop().run_in_executor(self._threads, lambda: held.pop()())
            return await unless_client_leaves(receive, done)
        finally:
            self._characters -= characters
            held.clear()

    def close(self) -> None:
        """What waits is not done any more, so that a server need not wait for it at its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
