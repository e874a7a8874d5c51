"""AnswerDrafts: who drafts for one answer. It takes the drafter whose drafts are expected to bring most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hamburger.engine.drafting.lookup import Lookup, Prediction
from hamburger.engine.drafting.proposal import Drafter, Proposal

_KEPT = 0.9  # of what is known of a drafter, each time that it foretells a token
_LEFT = 0.6  # of the doubt about a text's next token, once this one was right (docs/log.md)
_PRIOR = {"lookup": (1.0, 2.0), "prediction": (1.6, 2.0)}  # accepted, of drafts: what a drafter begins with
_LOOKS = 8  # a drafter whose drafts do not pay is asked all the same once in so many macro-steps
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
        self._foretold: dict[Drafter, int] = {}  # the next token
        self._num_asked = 0
        self._leader: Drafter | None = None

    def extend(self, token_ids: Sequence[int]) -> None:
        """These were emitted. Whoever foretold the first of them was right, whether that draft was checked or not."""
        for name, token_id in self._foretold.items():
            accepted, drafts = self._counts[name]
            self._counts[name] = [accepted * _KEPT + (token_id == token_ids[0]), drafts * _KEPT + 1]
        self._foretold.clear()
        for drafter in self._drafters.values():
            drafter.extend(token_ids)

    def best(self, micro: Proposal | None, most: int, least: float) -> Proposal | None:
        """At most so many drafts. micro: those of the micro decoder. least: a chance that the first must be above."""
        found = micro.first(most) if micro is not None else None
        self._num_asked += 1
        for name, drafter in self._drafters.items():
            missed = 1 - self._chance(name)
            pays = 1 - missed > least
            if not pays and self._num_asked % _LOOKS:
                continue
            token_ids = drafter.after(most)
            if not token_ids:
                continue
            self._foretold[name] = token_ids[0]
            proposal = Proposal(name, token_ids, [1 - missed * _LEFT**place for place in range(len(token_ids))])
            if pays and (found is None or proposal.expected > found.expected):
                found = proposal
        self._leader = None if found is None else found.drafter
        return found

    @property
    def needs_micro(self) -> bool:
        """Whether the micro decoder's next drafts may be of use."""
        return self._leader in (None, "micro") or self._chance(self._leader) < _SURE

    def _chance(self, drafter: Drafter) -> float:
        """Of the first draft."""
        accepted, drafts = self._counts[drafter]
        return accepted / drafts
