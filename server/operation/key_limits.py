"""KeyLimits: how much of the server one API key may take: requests at once, tokens a minute, places in the queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from hamburger.engine.queue_room import ClientLoad
from hamburger.engine.types.errors import InvalidRequest, RateLimited
from hamburger.server.config import ServeSettings


class Admitting(Protocol):
    """The part of an engine that is asked."""

    def load_of(self, client: str) -> ClientLoad: ...

    def retry_after(self, num_requests: int) -> int:
        """Whole seconds until so many more requests should have left."""


class KeyLimits:
    """A request is each of the answers that it asks for. Belongs to one event loop; clock: seconds."""

    def __init__(self, settings: ServeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = settings.key_requests
        self._tokens_per_minute = settings.key_tokens_per_minute
        self._queue_share = settings.key_queue_share
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # tokens of each key, and when that was

    def check(self, key: str, number: int, field: str, engine: Admitting, engines: Iterable[Admitting]) -> None:
        """Whether so many more answers of one engine (engines: all) are allowed. field: of the request, that asks for
        them.

        Raises RateLimited, which says what is reached, and InvalidRequest for more than a limit ever admits.
        """
        if not key:
            return
        self._check_requests(key, number, field, engine, engines)
        self._check_queue(key, number, field, engine)
        if self._tokens_per_minute is not None and (left := self.tokens_left(key)) <= 0:
            seconds = math.floor(-left * 60 / self._tokens_per_minute) + 1
            message = f"This API key has used its {self._tokens_per_minute:,} tokens a minute (key_tokens_per_minute)"
            raise RateLimited(f"{message}: try again in {seconds} s.", seconds)

    def spend(self, key: str, num_tokens: int) -> None:
        """Of a prompt that is to be answered, or of an answer."""
        if key and self._tokens_per_minute is not None:
            self._left[key] = (self.tokens_left(key) - num_tokens, self._clock())

    def headers(self, key: str) -> dict[str, str]:
        """OpenAI's of a limit of tokens, where there is one: what it is, what is left, until when all has come back."""
        if not key or self._tokens_per_minute is None:
            return {}
        left = self.tokens_left(key)
        seconds = (self._tokens_per_minute - left) * 60 / self._tokens_per_minute
        return {
            "X-RateLimit-Limit-Tokens": str(self._tokens_per_minute),
            "X-RateLimit-Remaining-Tokens": str(max(0, math.floor(left))),
            "X-RateLimit-Reset-Tokens": f"{seconds:.3f}s",
        }

    def tokens_left(self, key: str) -> float:
        """A minute's tokens at first. What is spent comes back evenly; below 0 where answers went beyond it."""
        most = self._tokens_per_minute or 0
        left, since = self._left.get(key, (float(most), 0.0))
        return min(float(most), left + (self._clock() - since) * most / 60)

    def _check_requests(
        self, key: str, number: int, field: str, engine: Admitting, engines: Iterable[Admitting]
    ) -> None:
        most = self._requests
        if most is None:
            return
        if number > most:
            message = f"The request asks for {number} answers, but a key may have {most} at once (key_requests)."
            raise InvalidRequest(message, field)
        open_now = sum(each.load_of(key).num_open for each in engines)
        if open_now + number > most:
            message = f"This API key has {open_now} of at most {most} requests at once (key_requests)"
            raise RateLimited(f"{message}: try again later.", engine.retry_after(open_now + number - most))

    def _check_queue(self, key: str, number: int, field: str, engine: Admitting) -> None:
        if self._queue_share == 1:
            return
        load = engine.load_of(key)
        share = math.floor(self._queue_share * load.max_queue)
        if number > share + load.seats:
            message = f"The request asks for {number} answers, but a key may have {share + load.seats} at once"
            raise InvalidRequest(f"{message}: its share of the queue (key_queue_share) and all seats.", field)
        waiting, most = load.num_without_token, share + load.free_seats
        if waiting + number > most:
            message = f"{waiting} requests of this API key wait, which is its share of the queue (key_queue_share)"
            raise RateLimited(f"{message}: try again later.", engine.retry_after(waiting + number - most))
