"""RecentGroups: what the gauges over a window of time are computed from. It knows no Prometheus."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

RATIO_WINDOW_SECONDS = 60.0
SPEED_WINDOW_SECONDS = 10.0


class RecentGroups:
    """Tokens, slots and groups of the last minute, in buckets of a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: deque[tuple[int, int, int, int]] = deque()  # (second, tokens, slots, groups)

    def add(self, num_tokens: int, num_slots: int, num_groups: int) -> None:
        second = int(self._clock())
        if self._buckets and self._buckets[-1][0] == second:
            _, tokens, slots, groups = self._buckets.pop()
            num_tokens, num_slots, num_groups = num_tokens + tokens, num_slots + slots, num_groups + groups
        self._buckets.append((second, num_tokens, num_slots, num_groups))
        while self._buckets[0][0] < second - RATIO_WINDOW_SECONDS:
            self._buckets.popleft()

    def tokens_per_kv(self) -> float:
        """Over the last RATIO_WINDOW_SECONDS; 0 without work."""
        tokens, slots, _ = self._sum(RATIO_WINDOW_SECONDS)
        return tokens / slots if slots > 0 else 0.0

    def tokens_per_macro_step(self) -> float:
        """Of one sequence; over the last RATIO_WINDOW_SECONDS; 0 without work."""
        tokens, _, groups = self._sum(RATIO_WINDOW_SECONDS)
        return tokens / groups if groups else 0.0

    def tokens_per_second(self) -> float:
        """Over the last SPEED_WINDOW_SECONDS."""
        return self._sum(SPEED_WINDOW_SECONDS)[0] / SPEED_WINDOW_SECONDS

    def _sum(self, seconds: float) -> tuple[int, int, int]:
        start = int(self._clock()) - seconds
        recent = [counts for second, *counts in self._buckets if second > start]
        tokens, slots, groups = (sum(column) for column in zip(*recent, strict=True)) if recent else (0, 0, 0)
        return tokens, slots, groups
