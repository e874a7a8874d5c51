"""Generation: the choices of one HTTP request as one sequence, in which silence can be heard."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from hamburger.engine.request import RequestUpdate
from hamburger.engine.request_stream import Mailbox, RequestStream, StreamItem
from hamburger.engine.types.errors import EngineDead
from hamburger.server.operation.request_log import Moments

_SILENCE: Literal["silence"] = "silence"  # in place of what did not come


class Generation:
    """The choices of one HTTP request as one sequence of (choice index, update), in the order in which they come.

    Raises what the first failing choice raises. `abort` gives all of them up; call it whenever the answer ends early.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        on_tokens: Callable[[int], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """on_tokens: is told how many each update brings. on_end: that every choice has ended, none with an error."""
        self._streams, self._on_tokens, self._on_end = streams, on_tokens, on_end
        self._arrived: Mailbox[tuple[int, StreamItem | Literal["silence"]]] = Mailbox()
        self._last_sent = 0.0  # time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._num_open = len(streams)
        self._take_at_once: Callable[[int, RequestUpdate], bool] | None = None
        for index, stream in enumerate(streams):
            stream.tell(partial(self._arrive, index))

    async def __aiter__(self) -> AsyncGenerator[tuple[int, RequestUpdate]]:
        while (arrived := await self._next()) is not None:
            if arrived != _SILENCE:
                yield arrived

    async def or_silence(self, seconds: float | None) -> AsyncGenerator[tuple[int, RequestUpdate] | None]:
        """As iterating; None each time that nothing has been sent for so many seconds (None: never)."""
        with self._listened_to(seconds):
            while (arrived := await self._next()) is not None:
                yield None if arrived == _SILENCE else arrived

    async def first(self, seconds: float | None) -> tuple[int, RequestUpdate] | None:
        """Wait so long for the first group; None: it has not come. Iterating goes on after it."""
        with self._listened_to(seconds):
            arrived = await self._next()
        if arrived is None:
            raise EngineDead("The answer ended before it began.")
        return None if arrived == _SILENCE else arrived

    @contextlib.contextmanager
    def _listened_to(self, seconds: float | None) -> Iterator[None]:
        """Silence arrives as groups do: to wait for them with a timeout would cost a task for each."""
        if seconds is None:
            yield
            return
        loop, begun = asyncio.get_running_loop(), time.monotonic()

        def look() -> None:
            left = max(self._last_sent, begun) + seconds - time.monotonic()
            if left <= 0:
                self._arrived.put((0, _SILENCE))
            self._timer = loop.call_later(left if left > 0 else seconds, look)

        self._timer = loop.call_later(seconds, look)
        try:
            yield
        finally:
            self._stop_timer()

    def has_sent(self) -> None:
        """The client was sent something: what comes may be held back, and silence is what the client hears."""
        self._last_sent = time.monotonic()

    def offer(self, take: Callable[[int, RequestUpdate], bool]) -> None:
        """Have `take` asked about each update as it comes, in the callback that brings it, while whoever iterates waits
        for just that: what it takes (True), nobody else gets."""
        self._take_at_once = take

    def abort(self) -> None:
        self._stop_timer()  # whoever listened may never be told to end
        for stream in self._streams:
            stream.abort()

    def moments(self) -> Moments:
        scheduled = (stream.scheduled for stream in self._streams if stream.scheduled is not None)
        first_token = (stream.first_token for stream in self._streams if stream.first_token is not None)
        arrival = self._streams[0].request.arrival_time
        return Moments(arrival, min(scheduled, default=None), min(first_token, default=None))

    def times(self) -> dict[str, float | None]:
        """Seconds from admission until the first choice had slots, and until its first group; None if it never had."""
        arrival, scheduled, first_token = self.moments()
        return {
            "queue_seconds": None if scheduled is None else round(scheduled - arrival, 4),
            "ttft_seconds": None if first_token is None else round(first_token - arrival, 4),
        }

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arrive(self, index: int, item: StreamItem) -> None:
        if isinstance(item, RequestUpdate):
            self._on_tokens(len(item.token_ids))
            if self._take_at_once is not None and self._arrived.is_awaited and self._take_at_once(index, item):
                return
        self._arrived.put((index, item))

    async def _next(self) -> tuple[int, RequestUpdate] | Literal["silence"] | None:
        """None: every choice has ended."""
        while self._num_open:
            index, item = await self._arrived.get()
            if item == _SILENCE:
                return item
            if isinstance(item, RequestUpdate):
                return index, item
            if item is not None:
                raise item
            self._num_open -= 1
            if not self._num_open:
                self._on_end()
        return None
