"""DraftOutcomes: what a step's groups say of its drafts, for the policy that plans the next ones. It ends no answer."""

from __future__ import annotations

from hamburger.engine.core.batch import GroupResult, ScheduledBatch, ScheduledSequence
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.drafting.proposal import FORCED, Proposal
from hamburger.engine.types.messages import CheckedDrafts, GroupOutput


class DraftOutcomes:
    """policy: learns from all of it; None where nobody plans drafts."""

    def __init__(self, policy: DraftPolicy | None) -> None:
        self._policy = policy

    def checked(self, item: ScheduledSequence, drafts: Proposal, group: GroupResult) -> CheckedDrafts:
        """What came of the drafts that a step checked. All but the last token of a group are drafts."""
        num_accepted = len(group.token_ids) - 1
        sequence, number = item.sequence, len(drafts.token_ids)
        foretold: list[float] | None = None  # those of texts are told of below
        if drafts.drafter == "grammar":
            foretold = [FORCED] * number
        elif drafts.drafter == "micro" and sequence.proposal is not None:
            foretold = sequence.proposal.chances[:number]
        if self._policy is not None and foretold is not None:
            self._policy.acceptance.observe(drafts.drafter, foretold, num_accepted, sequence.params.temperature)
        return CheckedDrafts(drafts.drafter, drafts.token_ids, drafts.chances, num_accepted)

    def take(self, sequence: Sequence, output: GroupOutput, group: GroupResult) -> None:
        """The drafts for a sequence's next macro-step; those of its text come of the group's tokens."""
        sequence.proposal = group.proposal
        if group.proposal is not None and self._policy is not None:
            self._policy.acceptance.propose(group.proposal, sequence.params.temperature)
        if sequence.drafters is None:
            return
        for told, num_right in sequence.drafters.extend(output.token_ids):
            if self._policy is not None:
                self._policy.acceptance.observe(told.drafter, told.chances, num_right, sequence.params.temperature)

    def timed(self, batch: ScheduledBatch, seconds: float) -> None:
        """What a step without prompts took."""
        if self._policy is None or not batch.sequences:
            return
        drafting = [item.max_drafts for item in batch.sequences if item.max_drafts]
        in_parts = any(item.emits and item.sequence.needs_logits for item in batch.sequences)
        self._policy.observe(batch.num_rows, max(drafting, default=0), len(drafting), seconds, in_parts=in_parts)
