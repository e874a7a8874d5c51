"""AnswerDrafts: who drafts for one answer. It takes the drafter whose drafts are expected to bring most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hamburger.engine.drafting.lookup import Lookup, Prediction
from hamburger.engine.drafting.proposal import Drafter, Proposal

_KEPT = 0.9  # of what is known of a drafter, each time that it foretells a token
_LEFT = 0.6  # of the doubt about a text's next token, once this one was right (docs/log.md)
_PRIOR = {"lookup": (1.0, 2.0), "prediction": (1.6, 2.0)}  # accepted, of drafts: what a drafter begins with
_SURE = 0.9  # a drafter of the host that is right so often: the micro decoder need not draft beside it


class TextDrafter(Protocol):
    """A drafter that knows the answer's tokens alone."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """These were emitted."""

    def after(self, most: int) -> list[int]:
        """At most so many tokens that may come next."""


class AnswerDrafts:
    """One answer's drafters beside the micro decoder, and how often each was right."""

    def __init__(self, prompt_ids: Sequence[int], prediction_ids: Sequence[int] = ()) -> None:
        self._drafters: dict[Drafter, TextDrafter] = {"lookup": Lookup(prompt_ids)}
        if prediction_ids:
            self._drafters = {"prediction": Prediction(prediction_ids), **self._drafters}
        self._counts = {drafter: list(_PRIOR[drafter]) for drafter in self._drafters}
        self._looked_at: list[Proposal] = []  # of what comes next, with chances uncorrected
        self._unread: list[int] = []  # what the drafters have not been told yet
        self._likeliest = self._highest_chance()
        self._leader: Drafter | None = None

    def extend(self, token_ids: Sequence[int]) -> list[tuple[Proposal, int]]:
        """These were emitted. Of each proposal that was looked at, whether it was checked or not: as much of it as is
        known now, with how many of its first tokens were right."""
        self._unread += token_ids
        found = list[tuple[Proposal, int]]()
        if not self._looked_at:
            return found
        for proposal in self._looked_at:
            pairs = zip(proposal.token_ids, token_ids, strict=False)
            right = next((i for i, (draft, token_id) in enumerate(pairs) if draft != token_id), None)
            accepted, drafts = self._counts[proposal.drafter]
            self._counts[proposal.drafter] = [accepted * _KEPT + (right != 0), drafts * _KEPT + 1]
            known = min(len(proposal.token_ids), len(token_ids) if right is None else right + 1)
            if (told := proposal.first(known)) is not None:
                found.append((told, known if right is None else right))
        self._looked_at = []
        self._likeliest = self._highest_chance()
        return found

    def best(
        self,
        micro: Proposal | None,
        most: int,
        least: float,
        corrected: Callable[[Proposal], Proposal] = lambda proposal: proposal,
        *,
        looks: bool = False,
    ) -> Proposal | None:
        """At most so many drafts. micro: those of the micro decoder. least: a chance that the first must be above.
        corrected: of others' drafts. looks: ask also whose drafts have not had such chances."""
        found = micro.first(most) if micro is not None else None
        if micro is None and self._likeliest <= least and not looks:
            self._leader = None  # as below, for many answers at once, of which none has drafts that pay
            return None
        if self._unread:
            for drafter in self._drafters.values():
                drafter.extend(self._unread)
            self._unread = []
        for name, drafter in self._drafters.items():
            missed = 1 - self._chance(name)
            if 1 - missed <= least and not looks:
                continue
            token_ids = drafter.after(most)
            if not token_ids:
                continue
            proposal = Proposal(name, token_ids, [1 - missed * _LEFT**place for place in range(len(token_ids))])
            self._looked_at.append(proposal)
            proposal = corrected(proposal)
            if proposal.chances[0] > least and (found is None or proposal.expected > found.expected):
                found = proposal
        self._leader = None if found is None else found.drafter
        return found

    @property
    def needs_micro(self) -> bool:
        """Whether the micro decoder's next drafts may be of use."""
        return self._leader in (None, "micro") or self._chance(self._leader) < _SURE

    def _highest_chance(self) -> float:
        return max(self._chance(drafter) for drafter in self._drafters)

    def _chance(self, drafter: Drafter) -> float:
        """Of the first draft."""
        accepted, drafts = self._counts[drafter]
        return accepted / drafts
