"""The drafts of a step's sequences, with verified groups: rows beside a sequence's newest slot, in the slots behind it.

They take what budget and blocks the step has left when all else is chosen, so nobody is preempted, delayed or refused
for a draft's sake. How many pay, DraftPolicy says.
"""

from __future__ import annotations

from hamburger.engine.core.batch import ScheduledSequence
from hamburger.engine.core.block_manager import BlockManager
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.drafting.proposal import Proposal, forced_or


def with_drafts(
    scheduled: list[ScheduledSequence], policy: DraftPolicy, blocks: BlockManager, max_step_slots: int, max_group: int
) -> list[ScheduledSequence]:
    """What is scheduled, with the drafts that pay, whose blocks their sequences have from now on."""
    num_slots = sum(item.num_slots for item in scheduled)
    num_emitting = sum(item.emits for item in scheduled)
    in_parts = any(item.emits and item.sequence.needs_logits for item in scheduled)
    plan = policy.plan(num_emitting, num_slots - num_emitting, in_parts=in_parts)
    are_asked, looks = policy.begin_step(plan, num_emitting)
    is_known = any(item.sequence.proposal or item.sequence.matcher for item in scheduled)
    if not plan.max_drafts and not are_asked and not is_known:
        return scheduled
    offered = [_offered(item, policy, plan.least, looks, max_group) for item in scheduled]
    if not plan.max_drafts and not any(offered):
        return scheduled
    floors = [item.sequence.params.confidence or 0.0 for item in scheduled]
    numbers = policy.choose(num_slots, num_emitting, offered, floors, in_parts=in_parts)
    spare = max_step_slots - num_slots
    found = []
    for item, proposal, number, floor in zip(scheduled, offered, numbers, floors, strict=True):
        drafts = None if proposal is None else proposal.first(min(number, spare))
        if drafts is not None:
            room = blocks.grow_as_far(item.sequence, item.sequence.num_slots + len(drafts.token_ids))
            drafts = drafts.first(room - item.sequence.num_slots)
        spare -= 0 if drafts is None else len(drafts.token_ids)
        drafters = item.sequence.drafters
        wants_more = (
            item.emits and floor < 1 and not item.sequence.num_renewals and (drafters is None or drafters.needs_micro)
        )
        most = plan.max_drafts if wants_more else 0
        if drafts is not None or most:
            least = max(plan.min_chance, floor)
            item = ScheduledSequence(item.sequence, item.num_slots, item.emits, drafts, most, least)
        found.append(item)
    return found


def _offered(
    item: ScheduledSequence, policy: DraftPolicy, least: float, looks: bool, max_group: int
) -> Proposal | None:
    """The best drafts that there are for a decoding sequence, if the first of them has a chance above least."""
    sequence = item.sequence
    if not item.emits or item.num_slots != 1 or sequence.params.confidence == 1 or sequence.num_renewals:
        return None
    micro, drafters, temperature = sequence.proposal, sequence.drafters, sequence.params.temperature
    most = min(max_group, sequence.num_tokens_left, sequence.num_slots_at_once) - 1
    if most < 1 or (micro is None and drafters is None):
        return None

    def corrected(proposal: Proposal) -> Proposal:
        return policy.acceptance.corrected(proposal, temperature)

    if micro is not None:
        micro = corrected(micro)
        micro = micro if micro.chances[0] > least else None
    found = micro if drafters is None else drafters.best(micro, most, least, corrected, looks=looks)
    return found if sequence.matcher is None else forced_or(sequence.matcher.forced()[:most], found, corrected)
