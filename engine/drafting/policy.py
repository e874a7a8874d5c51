"""DraftPolicy: how many drafts a step checks, and how many the next one gets. It decides by what they cost and bring.

    tokens a second of a step = (its sequences + the sum of its drafts' chances) / (cost of its rows + micro-steps)

The chance of a draft here is that it and all before it are accepted, so it falls along a sequence, and the best drafts
of a batch are the first of some order: all are sorted by it, and the number is taken that makes the most of the above.
One draft more may cost little where a second row is nearly free, and much where the processor is at its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from hamburger.engine.drafting.acceptance import Acceptance
from hamburger.engine.drafting.costs import StepCosts
from hamburger.engine.drafting.proposal import Proposal

_STEPS_A_PLAN = 32
_WITHOUT = 16  # the step of a plan that makes no drafts, so that it stays known what such steps take
_GAIN = 1.02  # least that drafts must be expected to bring: less may as well be a loss
_LOOKS = 8  # steps, or as many as answers, in one of which drafters are asked whose drafts did not pay
_VAIN = 16  # steps without a draft, after which nobody is asked in the others, if drafts are dear
_DEAR = 0.5  # the chance that a draft must have then, or more
_UNKNOWN = 0.5  # the chance of a draft of the micro decoder, until some are known
_LENIENT = 0.7  # a chance so much below what pays may still be worth a look, as chances vary


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How many drafts the micro-steps make for a sequence, while the chance of all of them is at least min_chance.

    least: no draft whose chance is not above it pays, however many others are checked with it.
    """

    max_drafts: int
    min_chance: float
    least: float = 0.0


class DraftPolicy:
    """One engine's."""

    def __init__(self, costs: StepCosts, micro_drafts: int, max_rows: int | None = None) -> None:
        """costs: as measured. micro_drafts: most that the micro decoder makes; 0: there is none.

        max_rows: most rows that emit in a step with drafts; None: as many as there are slots for.
        """
        self._costs = {False: costs, True: StepCosts(costs.measured)}
        self._max_rows = max_rows
        self._micro_drafts = micro_drafts
        self.acceptance = Acceptance([_UNKNOWN] * micro_drafts)
        self._plans: dict[tuple[int, int, bool], DraftPlan] = {}
        self._num_steps = 0
        self._num_asked = self._num_vain = 0

    def costs(self, *, in_parts: bool = False) -> StepCosts:
        """in_parts: of steps in which some row's logits are changed or told, which are computed part by part."""
        return self._costs[in_parts]

    def choose(
        self,
        num_rows: int,
        num_emitting: int,
        drafts: Sequence[Proposal | None],
        floors: Sequence[float],
        *,
        in_parts: bool = False,
    ) -> list[int]:
        """How many drafts of each sequence to check, in a step of num_rows slots without them.

        floors: the least chance, of a draft and all before it, at which its sequence wants it.
        """
        candidates: list[tuple[float, int]] = []
        for index, (proposal, floor) in enumerate(zip(drafts, floors, strict=True)):
            together = 1.0
            for chance in proposal.chances if proposal is not None else ():
                together *= chance
                if together < floor:
                    break
                candidates.append((-together, index))
        chosen = [0] * len(drafts)
        if not candidates:
            return chosen
        candidates.sort()  # stable, so that a sequence's drafts stay in order
        if self._max_rows is not None:
            del candidates[max(0, self._max_rows - num_emitting) :]
        costs, plan = self._costs[in_parts], self.plan(num_emitting, num_rows - num_emitting, in_parts=in_parts)
        fixed = plan.max_drafts * costs.micro_step(num_emitting)
        tokens, most, number = float(num_emitting), _GAIN * num_emitting / (costs.step(num_rows) + fixed), 0
        for taken, (minus_chance, _) in enumerate(candidates, start=1):
            tokens -= minus_chance
            rate = tokens / (costs.step(num_rows + taken) + fixed)
            if rate > most:
                most, number = rate, taken
        if number:
            self._num_vain = 0
        for _, index in candidates[:number]:
            chosen[index] += 1
        return chosen

    def begin_step(self, plan: DraftPlan, num_emitting: int = 1) -> tuple[bool, bool]:
        """Whether the answers' drafters are asked in this step, and whether those are too whose drafts did not pay."""
        self._num_asked += 1
        self._num_vain += 1
        looks = self._num_asked % max(_LOOKS, num_emitting) == 0
        return looks or self._num_vain <= _VAIN or plan.least < _DEAR, looks

    def plan(self, num_emitting: int, other_rows: int = 0, *, in_parts: bool = False) -> DraftPlan:
        """For steps of so many sequences, and other_rows slots of prompts."""
        key = num_emitting, min(other_rows, 64) // 16 * 16, in_parts
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        plan = self._plans[key]
        return replace(plan, max_drafts=0) if self._num_steps % _STEPS_A_PLAN == _WITHOUT else plan

    def observe(
        self, num_rows: int, num_micro_steps: int, num_drafting: int, seconds: float, *, in_parts: bool = False
    ) -> None:
        """A step without prompts took so long."""
        if seconds > 0:
            self._costs[in_parts].observe(num_rows, num_micro_steps, num_drafting, 1000 * seconds)
        self._num_steps += 1
        if self._num_steps % _STEPS_A_PLAN == 0:
            if any(plan.max_drafts == 0 for plan in self._plans.values()):
                self.acceptance.recall()
            self._plans.clear()

    def _planned(self, num_emitting: int, other_rows: int, in_parts: bool) -> DraftPlan:
        """By the chances of the last proposals, as if each had as many sequences as it has a share in them."""
        costs = self._costs[in_parts]
        recent = [list(accumulate(chances, mul)) for chances in self.acceptance.recent]
        weight = num_emitting / len(recent) if recent else 0.0
        base = num_emitting + other_rows
        best = _GAIN * num_emitting / costs.step(base)
        plan = DraftPlan(0, 1.0)
        for depth in range(1, self._micro_drafts + 1):
            fixed = depth * costs.micro_step(num_emitting)
            tokens, rows = float(num_emitting), float(base)
            for chance in sorted((chance for chances in recent for chance in chances[:depth]), reverse=True):
                tokens += weight * chance
                rows += weight
                rate = tokens / (costs.step(rows) + fixed)
                if rate > best:
                    best, plan = rate, DraftPlan(depth, _LENIENT * chance)
        return replace(plan, least=_least(costs, num_emitting, base, plan.max_drafts))


def _least(costs: StepCosts, num_emitting: int, base: int, micro_drafts: int) -> float:
    """The mean chance that drafts must be above, at the number of them that asks least."""
    alone = costs.step(base)
    per_token = (alone + micro_drafts * costs.micro_step(num_emitting)) / num_emitting
    # Costs are linear between measured numbers, so one of these, or the next row, is the cheapest.
    rows = (base + 1, *(rows for rows in costs.measured.rows if rows > base))
    return min((costs.step(more) - alone) / (more - base) for more in rows) / per_token
