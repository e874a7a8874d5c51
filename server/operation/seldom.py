"""Seldom: a line of the log that whoever connects could cause without end, written once a second at most."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

_SECONDS = 1.0


class Seldom:
    """Warnings of one kind. Those that come within a second of one that was written are left out."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._next = -math.inf

    def warn(self, message: str, *values: object) -> None:
        now = self._clock()
        if now >= self._next:
            self._next = now + _SECONDS
            self._logger.warning(message, *values)
