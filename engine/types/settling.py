"""Settling: when old answer tokens are looked at, and how many of them keep their slot. Numbers alone.

    answer    0 ...................... settled ............ computed - window ............ computed
              one slot in 1 / keep     the next chunk       each token has its slot

The window grows with the answer, so a longer one is settled later. Everything here is a function of how many of the
answer's tokens have slots, so it is the same for every batch, draft and replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settling:
    """window: the newest tokens that keep their slots: the larger of it and `growth` of the answer.

    keep: the share of older ones that stays. chunk: tokens that are looked at together. apart: tokens between the
    places of an answer where it may settle.
    """

    window: int
    keep: float
    growth: float = 1 / 3
    chunk: int = 64
    apart: int = 32

    @property
    def kept(self) -> int:
        """Tokens of a chunk that stay."""
        return max(1, round(self.chunk * self.keep))

    def is_due(self, computed: int, settled: int) -> bool:
        """Whether the chunk behind the first `settled` tokens settles before the slot of token `computed` is made."""
        # A third of 192 is 64, whatever is rounded.
        window = max(self.window, math.floor(computed * self.growth + 1e-6))
        return computed % self.apart == 0 and settled + self.chunk <= computed - window

    def next_place(self, computed: int, settled: int) -> int:
        """The first number of computed tokens above `computed` at which a chunk is due."""
        place = computed - computed % self.apart + self.apart
        while not self.is_due(place, settled):
            place += self.apart
        return place

    def places(self, length: int) -> Iterator[tuple[int, int]]:
        """(computed, settled) of every chunk that settles while an answer grows to `length` tokens."""
        computed, settled = 0, 0
        while (computed := self.next_place(computed, settled)) < length:
            while self.is_due(computed, settled):
                yield computed, settled
                settled += self.chunk

    def settled_slots(self, length: int) -> int:
        """That an answer of so many tokens has given back."""
        return sum(1 for _ in self.places(length)) * (self.chunk - self.kept)

    def slots(self, length: int) -> int:
        """That it holds."""
        return length - self.settled_slots(length)

    def most_slots(self, length: int) -> int:
        """That it holds at any time while it grows to so many tokens: what it needs a pool for."""
        dropped = self.chunk - self.kept
        before = [computed - number * dropped for number, (computed, _) in enumerate(self.places(length))]
        return max([*before, self.slots(length)])
