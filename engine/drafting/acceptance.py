"""Acceptance: how often drafts were what the trunk chose, beside what was foretold of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hamburger.engine.drafting.proposal import Drafter, Proposal

_MEMORY = 256.0  # drafts of one kind
_PRIOR = 16.0  # drafts for which what is foretold counts
_RECENT = 64  # proposals that are kept
_PLACES = 4  # told apart
_LEVELS = 10  # of what is foretold: who foretells much is wrong in another way than who foretells little
_FADES = 0.98  # what is known of a draft's chance beside that of the one before, with each proposal

_Kind = tuple[Drafter, int, int, int]


class Acceptance:
    """Corrects chances by what came of such drafts before; remembers the last proposals."""

    def __init__(self, chances: Iterable[float]) -> None:
        """chances: of a proposal's drafts in the mean, until some are known."""
        self._counts: dict[_Kind, list[float]] = {}  # foretold, accepted
        self._prior = list(chances)
        self.recent: deque[list[float]] = deque([self._prior] * 8, maxlen=_RECENT)
        self._follow = [[4.0, 4.0] for _ in self._prior[1:]]  # chances of the drafts before, and of these

    def corrected(self, proposal: Proposal, temperature: float) -> Proposal:
        """With the chances that such drafts have had in answers of about that temperature."""
        chances = [
            min(chance * self._factor(_kind(proposal.drafter, place, chance, temperature)), 1.0)
            for place, chance in enumerate(proposal.chances)
        ]
        return Proposal(proposal.drafter, proposal.token_ids, chances)

    def observe(self, drafter: Drafter, foretold: Sequence[float], num_right: int, temperature: float) -> None:
        """So many of the first drafts with these chances, uncorrected, were right, and the next one, if any, wrong."""
        for place, chance in enumerate(foretold[: num_right + 1]):  # nothing is known of those behind
            counts = self._counts.setdefault(_kind(drafter, place, chance, temperature), [0.0, 0.0])
            if counts[0] > _MEMORY:
                counts[:] = (0.5 * count for count in counts)
            counts[0] += chance
            counts[1] += place < num_right

    def propose(self, proposal: Proposal, temperature: float) -> None:
        """The micro decoder has made these. What it was not let make is remembered too, as it is likely to be."""
        chances = self.corrected(proposal, temperature).chances
        for counts, (before, chance) in zip(self._follow, pairwise(chances), strict=False):
            counts[:] = counts[0] * _FADES + before, counts[1] * _FADES + chance
        for before, chance in self._follow[len(chances) - 1 :]:
            chances.append(min(chances[-1] * chance / before, 1.0))
        self.recent.append(chances)

    def recall(self) -> None:
        """Nothing was drafted for a while: what is remembered gives way to what was known at first."""
        self.recent.append(self._prior)

    def _factor(self, kind: _Kind) -> float:
        foretold, accepted = self._counts.get(kind, (0.0, 0.0))
        return (accepted + _PRIOR) / (foretold + _PRIOR)


def _kind(drafter: Drafter, place: int, chance: float, temperature: float) -> _Kind:
    """What chances are corrected by. The hotter an answer, the less often what a text foretells is chosen."""
    return drafter, min(place, _PLACES - 1), int(chance * _LEVELS), round(min(temperature, 2.0) * 2)
