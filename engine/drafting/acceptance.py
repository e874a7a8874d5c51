"""Acceptance: how often drafts were what the trunk chose, beside what their drafters foretold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hamburger.engine.drafting.proposal import Drafter, Proposal

_MEMORY = 512.0  # drafts of one place
_PRIOR = 32.0  # drafts for which what is foretold counts
_RECENT = 64  # proposals that are kept


class Acceptance:
    """Corrects chances by what came of such drafts before; remembers the last ones of the micro decoder."""

    def __init__(self, micro_chances: Iterable[float]) -> None:
        """micro_chances: of the micro decoder's drafts in the mean, until some are known."""
        self._counts: dict[tuple[Drafter, int], list[float]] = {}  # foretold, accepted
        prior = list(micro_chances)
        self.recent: deque[list[float]] = deque([prior] * 8, maxlen=_RECENT)
        self._prior = prior

    def corrected(self, proposal: Proposal) -> Proposal:
        """With the chances that drafts of this kind have had."""
        chances = [
            min(chance * self._factor(proposal.drafter, place), 0.99) for place, chance in enumerate(proposal.chances)
        ]
        return Proposal(proposal.drafter, proposal.token_ids, chances)

    def observe(self, drafts: Proposal, num_accepted: int) -> None:
        """These were checked, with the chances that their drafter gave them."""
        for place, chance in enumerate(drafts.chances[: num_accepted + 1]):  # nothing is known of those behind
            counts = self._counts.setdefault((drafts.drafter, min(place, 8)), [0.0, 0.0])
            if counts[0] > _MEMORY:
                counts[:] = (0.5 * count for count in counts)
            counts[0] += chance
            counts[1] += place < num_accepted

    def propose(self, proposal: Proposal) -> None:
        """The micro decoder has made these."""
        self.recent.append(proposal.chances)

    def recall(self) -> None:
        """Nothing was drafted for a while: what is remembered gives way to what was known at first."""
        self.recent.append(self._prior)

    def _factor(self, drafter: Drafter, place: int) -> float:
        foretold, accepted = self._counts.get((drafter, min(place, 8)), (0.0, 0.0))
        return (accepted + _PRIOR) / (foretold + _PRIOR)
