"""QueueRoom: whether the waiting queue has room for more requests, and when it will have. No asyncio."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.errors import QueueFull
from hamburger.engine.types.messages import StepStats

_MOST_FINISH_TIMES = 64


class ClientLoad(NamedTuple):
    """What a client has of an engine: num_open: its unfinished requests; num_without_token: those of them that have got
    nothing of their answers yet. max_queue: most requests that may wait. seats: for all clients together, and
    free_seats, those that nobody has."""

    num_open: int
    num_without_token: int
    max_queue: int
    free_seats: int
    seats: int


class QueueRoom:
    """What was sent to an engine, what its last report said of it, and when the last requests left.

    Times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._finish_times: deque[float] = deque(maxlen=_MOST_FINISH_TIMES)
        self.reset()

    def reset(self) -> None:
        """The engine has died, or another takes its place: nothing was sent to it yet."""
        self.num_sent = self.num_running = self._num_received = self._num_waiting = 0

    def count_sent(self) -> None:
        """Count a request that was sent."""
        self.num_sent += 1

    def update(self, num_received: int, stats: StepStats | None) -> None:
        """After a step: how many more requests the core had been given before it, and what it counted, if it did."""
        self._num_received += num_received
        if stats is not None:
            self.num_running, self._num_waiting = stats.num_running, stats.num_waiting

    def count_finished(self, now: float) -> None:
        self._finish_times.append(now)

    @property
    def num_waiting(self) -> int:
        """Requests that wait: those of the last report, and those that the core had not been given then."""
        return self._num_waiting + self.num_sent - self._num_received

    def check(self, num_requests: int, config: EngineConfig, now: float, oldest_arrival: float | None) -> None:
        """Raise QueueFull unless the waiting queue, with the seats that are free now, has room for all of them."""
        room = config.max_queue + self.free_seats(config) - self.num_waiting
        if num_requests > room:
            raise QueueFull(
                f"{self.num_waiting} requests wait and {self.num_running} run: the queue has no room for "
                f"{num_requests} more (max_queue is {config.max_queue}). Try again later.",
                self.retry_after(num_requests - room, config, now, oldest_arrival),
            )

    def free_seats(self, config: EngineConfig) -> int:
        return max(0, config.max_num_seqs - self.num_running)

    def retry_after(self, num_requests: int, config: EngineConfig, now: float, oldest_arrival: float | None) -> int:
        """Whole seconds until so many more requests should have left; oldest_arrival: of those that are here."""
        seconds = self._seconds_until_finished(num_requests, now, oldest_arrival)
        return math.ceil(min(max(1.0, seconds), config.max_queue_seconds))

    def _seconds_until_finished(self, num_requests: int, now: float, oldest_arrival: float | None) -> float:
        """Until so many more have left, at the rate of the last ones."""
        if len(self._finish_times) > 1:
            return num_requests * (now - self._finish_times[0]) / (len(self._finish_times) - 1)
        # Nothing to go by: what has taken so long will take as long again.
        return 0.0 if oldest_arrival is None else now - oldest_arrival
