"""Proposal: tokens that may follow a sequence's newest token, and how likely the trunk chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Drafter = Literal["micro", "lookup", "prediction"]


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
