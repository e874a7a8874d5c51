"""GrammarCache: the last compiled grammars, bounded in number and in memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_GRAMMARS = 64
MAX_BYTES = 64 << 20
FRESH_SECONDS = 2.0
# Answers of one compiled grammar share what its lexer has built, up to a limit: so many use it, then it is made anew.
MAX_USES = 64

T = TypeVar("T")


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    num_bytes: int
    used_at: float
    num_uses: int = 0


class GrammarCache(Generic[T]):
    """Any thread may use it. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry[T]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, grammar: str) -> T | None:
        """None for one that is not here, or has been used often enough."""
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is None or entry.num_uses >= MAX_USES:
                return None
            self._entries.move_to_end(grammar)
            entry.used_at = self._clock()
            return entry.value

    def put(self, grammar: str, value: T, num_bytes: int) -> None:
        """The least recently used go, but none that was used a moment ago: an engine compiles it for a request that it
        takes after its step."""
        now = self._clock()
        with self._lock:
            self._drop([grammar])
            self._entries[grammar] = _Entry(value, num_bytes, now)
            self.num_bytes += num_bytes
            while len(self._entries) > MAX_GRAMMARS or self.num_bytes > MAX_BYTES:
                oldest = next(iter(self._entries))
                if self._entries[oldest].used_at > now - FRESH_SECONDS:
                    break
                self._drop([oldest])

    def count_use(self, grammar: str) -> None:
        """An answer has begun with it."""
        with self._lock:
            if (entry := self._entries.get(grammar)) is not None:
                entry.num_uses += 1

    def forget(self, grammar: str) -> None:
        with self._lock:
            self._drop([grammar])

    def forget_unused(self, seconds: float) -> None:
        """What nobody has used for so long."""
        before = self._clock() - seconds
        with self._lock:
            self._drop([grammar for grammar, entry in self._entries.items() if entry.used_at <= before])

    def _drop(self, grammars: list[str]) -> None:
        for grammar in grammars:
            if (entry := self._entries.pop(grammar, None)) is not None:
                self.num_bytes -= entry.num_bytes
