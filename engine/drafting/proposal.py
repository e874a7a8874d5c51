"""Proposal: tokens that may follow a sequence's newest token, and how likely the trunk chooses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Drafter = Literal["micro", "lookup", "prediction", "grammar"]
FORCED = 0.95  # a token that a grammar forces: others may spell the same text


@dataclass(frozen=True, slots=True)
class Proposal:
    """At least one draft. chances[i]: that draft i is accepted if those before it are, in [0, 1]."""

    drafter: Drafter
    token_ids: list[int]
    chances: list[float]

    def first(self, number: int) -> Proposal | None:
        """The first drafts of it; None where these are none."""
        if number >= len(self.token_ids):
            return self
        return Proposal(self.drafter, self.token_ids[:number], self.chances[:number]) if number > 0 else None

    @property
    def expected(self) -> float:
        """How many of them are accepted in the mean."""
        total, chance = 0.0, 1.0
        for each in self.chances:
            chance *= each
            total += chance
        return total


def forced_or(
    forced: Sequence[int], other: Proposal | None, corrected: Callable[[Proposal], Proposal]
) -> Proposal | None:
    """What a grammar forces, in at least as many tokens as it may draft; or what another has drafted, if that begins
    so and is expected to bring more. corrected: of a grammar's drafts."""
    if not forced:
        return other
    own = corrected(Proposal("grammar", [*forced], [FORCED] * len(forced)))
    agree = other is not None and all(a == b for a, b in zip(forced, other.token_ids, strict=False))
    return other if other is not None and agree and other.expected > own.expected else own
