"""EarlyExit: whether a captured step shall ask, after each token, if any group goes on. Numbers only; no torch.

    all micro-steps   choose 0 ─► micro-step 1 ─► micro-step 2 ─► micro-step 3         nothing waits
    early exit        choose 0 ─► check ─► micro-step 1 ─► check ─► nobody goes on     the device waits in each check

Of a step of up to G tokens, with p[i] the share of steps whose longest group has more than i tokens (p[0] = 1):

    all   (G - 1) x micro-step
    exit  sum of p[i - 1] x check + p[i] x micro-step, for i from 1 to G - 1

A step that is launched behind a running one (overlap) pays more for an exit: the host stays until the last check, and
what it would have done meanwhile it then does while the device has nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

WEIGHT = 1 / 64  # of the newest step in the running means


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, in a batch of one bucket. micro_step: of one, with the choice after it. check: asking whether any group
    goes on, and launching what follows only then."""

    micro_step: float
    check: float


class EarlyExit:
    """What was measured and seen so far, for each bucket of rows. max_group: most tokens of a group."""

    def __init__(self, max_group: int) -> None:
        self._max_group = max_group
        self._costs: dict[int, Costs] = {}
        self._longer: dict[int, list[float]] = {}  # p of the drawing; until something was seen, nothing is spared
        self._host: float | None = None

    @property
    def costs(self) -> Mapping[int, Costs]:
        """What was measured, by bucket."""
        return self._costs

    def measured(self, bucket: int, costs: Costs) -> None:
        self._costs[bucket] = costs
        self._longer.setdefault(bucket, [1.0] * self._max_group)

    def saw(self, bucket: int, width: int, longest: int) -> None:
        """A step of groups of up to `width` tokens, the longest of which has `longest`."""
        longer = self._longer.get(bucket, [])
        for i in range(1, min(width, len(longer))):
            longer[i] += WEIGHT * ((longest > i) - longer[i])

    def saw_host(self, seconds: float) -> None:
        """The host's work between a step's numbers and the next launch behind a running step."""
        self._host = seconds if self._host is None else self._host + WEIGHT * (seconds - self._host)

    def pays(self, bucket: int, width: int, *, behind: bool) -> bool:
        """Whether checks cost less than what they spare, in a step of groups of up to `width` tokens.

        behind: it is launched behind a running step.
        """
        costs = self._costs.get(bucket)
        if costs is None:
            return False
        expected = sum(
            before * costs.check + after * costs.micro_step for before, after in pairwise(self._longer[bucket][:width])
        )
        exposed = (self._host or 0.0) if behind else 0.0
        return expected + exposed < (width - 1) * costs.micro_step
