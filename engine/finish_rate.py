"""How fast requests leave, for the Retry-After of those that are turned away."""

from __future__ import annotations

from collections import deque

_REMEMBERED = 64


class FinishRate:
    """The times at which the last requests left, in seconds of one clock."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, now: float) -> None:
        self._times.append(now)

    def seconds_until(self, num_requests: int, now: float, oldest_arrival: float | None) -> float:
        """Until so many more have left, at the rate of the last ones; oldest_arrival: of the requests that are here."""
        if len(self._times) > 1:
            return num_requests * (now - self._times[0]) / (len(self._times) - 1)
        # Nothing to go by: what has taken so long will take as long again.
        return 0.0 if oldest_arrival is None else now - oldest_arrival
