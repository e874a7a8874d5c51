"""Settling: when old answer tokens are looked at, and how many of them keep their slot. Numbers alone.

    answer    0 ...................... settled ............ computed - window ............ computed
              one slot in 1 / keep     the next chunk       each token has its slot

The window may grow with the answer, so that a longer one is settled later. With a limit it does not grow beyond half of
that, and what settles takes the slots of what settled first, so that an endless answer needs no more. Everything here
is a function of how many of the answer's tokens have slots, so it is the same for every batch, draft and replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hamburger.model.config import ConfigError

# What suits a model of which nothing is known.
DEFAULTS: Mapping[str, float] = {"settle_window": 192, "settle_growth": 1 / 3, "settle_keep": 1 / 8}


@dataclass(frozen=True, slots=True)
class Settling:
    """window: the newest tokens that keep their slots: the larger of it and `growth` of the answer.

    keep: the share of older ones that stays. chunk: tokens that are looked at together. apart: tokens between the
    places of an answer where it may settle. limit: most slots that an answer holds; None: as many as it comes to.
    """

    window: int
    keep: float
    growth: float = 1 / 3
    chunk: int = 64
    apart: int = 32
    limit: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit that holds too little."""
        if self.limit is not None and self.limit < self.least_limit:
            raise ConfigError(
                f"settle_limit is {self.limit}, but a window of {self.window} with a settle_keep of {self.keep:g} "
                f"needs {self.least_limit} at least: raise it{', or lower settle_window' * (self.window > 32)}."
            )

    @classmethod
    def of_model(
        cls,
        fitted: Mapping[str, float],
        window: int | None = None,
        growth: float | None = None,
        keep: float | None = None,
        limit: int | None = None,
    ) -> Settling:
        """What the user says; where that is None, what was fitted to the model (settle_settings.py), or DEFAULTS.

        Raises ConfigError for a limit that holds too little.
        """
        suits = {**DEFAULTS, **fitted}
        return cls(
            window=int(suits["settle_window"]) if window is None else window,
            growth=suits["settle_growth"] if growth is None else growth,
            keep=suits["settle_keep"] if keep is None else keep,
            limit=limit,
        )

    @property
    def told(self) -> str:
        """Its settings, for people and for what must tell two of them apart."""
        limit = "" if self.limit is None else f", limit {self.limit}"
        return f"window {self.window}, growth {self.growth:.4g}, keep {self.keep:.4g}{limit}"

    @property
    def kept(self) -> int:
        """Slots of a chunk that stay."""
        return max(1, round(self.chunk * self.keep))

    @property
    def least_limit(self) -> int:
        """The smallest limit: a chunk has room beside the window, which may grow to half of it."""
        if not self.growth:
            return self.window + self.chunk + self.apart + self.kept
        return max(2 * self.window, 2 * (self.chunk + self.apart + self.kept))

    @property
    def most_chunks(self) -> float:
        """Settled chunks that have slots at a time."""
        if self.limit is None:
            return math.inf
        # While a chunk waits for its place, it and all that is newer have their slots.
        widest = self.limit // 2 if self.growth else self.window
        return (self.limit - widest - self.chunk - self.apart) // self.kept

    def kept_slots(self, settled: int) -> int:
        """That the first `settled` tokens, which have settled, hold."""
        return int(min(settled // self.chunk, self.most_chunks)) * self.kept

    def is_due(self, computed: int, settled: int) -> bool:
        """Whether the chunk behind the first `settled` tokens settles before the slot of token `computed` is made."""
        # A third of 192 is 64, whatever is rounded.
        window = max(self.window, math.floor(computed * self.growth + 1e-6))
        if self.limit is not None and self.growth:
            window = min(window, self.limit // 2)
        return computed % self.apart == 0 and settled + self.chunk <= computed - window

    def next_place(self, computed: int, settled: int) -> int:
        """The first number of computed tokens above `computed` at which a chunk is due."""
        place = max(computed // self.apart + 1, self._earliest(settled) // self.apart) * self.apart
        while not self.is_due(place, settled):
            place += self.apart
        return place

    def _earliest(self, settled: int) -> int:
        """No chunk is due at fewer computed tokens: where a search may begin."""
        beyond, widest = settled + self.chunk, math.inf if self.limit is None or not self.growth else self.limit // 2
        earliest = beyond + min(self.window, widest)
        if self.growth:
            earliest = max(earliest, min(beyond / (1 - self.growth) - self.apart, beyond + widest))
        return int(earliest)

    def places(self, length: int) -> Iterator[tuple[int, int]]:
        """(computed, settled) of every chunk that settles while an answer grows to `length` tokens."""
        computed, settled = 0, 0
        while (computed := self.next_place(computed, settled)) < length:
            while self.is_due(computed, settled):
                yield computed, settled
                settled += self.chunk

    def settled_slots(self, length: int) -> int:
        """That an answer of so many tokens has given back."""
        settled = sum(self.chunk for _ in self.places(length))
        return settled - self.kept_slots(settled)

    def slots(self, length: int) -> int:
        """That it holds."""
        return length - self.settled_slots(length)

    def most_slots(self, length: int) -> int:
        """That it holds at any time while it grows to so many tokens: what it needs a pool for."""
        before = [computed - settled + self.kept_slots(settled) for computed, settled in self.places(length)]
        return max([*before, self.slots(length)])
