"""Accepting: what a step gave goes to its sequences, which take a group, end, or fail with their grammar."""

from __future__ import annotations

from hamburger.engine.core.batch import BatchResult, GroupResult, ScheduledBatch, ScheduledSequence
from hamburger.engine.core.draft_outcomes import DraftOutcomes
from hamburger.engine.core.matchers import Matchers
from hamburger.engine.core.scheduler import Scheduler
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.messages import GroupOutput, RequestFailed


class Accepting:
    """scheduler: whose sequences these are."""

    def __init__(self, scheduler: Scheduler, matchers: Matchers, drafts: DraftOutcomes) -> None:
        self._scheduler = scheduler
        self._matchers = matchers
        self._drafts = drafts

    def take(
        self, batch: ScheduledBatch, ends: list[int], result: BatchResult, failures: list[RequestFailed]
    ) -> list[GroupOutput]:
        """What the clients of a batch are told. Those that are finished leave the scheduler; a request whose grammar
        failed is added to `failures`. ends: how many slots of each sequence are in the pool.

        A sequence that ended since the batch was launched gets nothing: its group is nobody's.
        """
        num_emits = sum(item.emits for item in batch.sequences)
        if len(result.groups) != num_emits:
            raise RuntimeError(f"the runner gave {len(result.groups)} groups for {num_emits} sequences.")
        outputs: list[GroupOutput] = []
        groups = iter(result.groups)
        for item, end in zip(batch.sequences, ends, strict=True):
            sequence, group = item.sequence, next(groups) if item.emits else None
            if not self._scheduler.holds(sequence):
                continue
            if sequence.prompt_logprobs is not None:
                sequence.score(result.prompt_logprobs.get(sequence.request_id, ()))
            output = self._come_to(sequence, end) if group is None else self._take_group(item, end, group, failures)
            if output is not None:
                outputs.append(output)
        for output in outputs:
            if output.finish_reason is not None:
                self._scheduler.remove(output.request_id)
        return outputs

    def _come_to(self, sequence: Sequence, end: int) -> GroupOutput | None:
        """It has `end` slots and no group yet. Its output, where it wants none."""
        self._scheduler.blocks.mark_computed(sequence, end)
        return sequence.finish_prompt() if sequence.is_prompt_only and end == sequence.num_slots else None

    def _take_group(
        self, item: ScheduledSequence, end: int, group: GroupResult, failures: list[RequestFailed]
    ) -> GroupOutput | None:
        sequence = item.sequence
        if self._matchers.has_failed(sequence):  # before the group was chosen
            if self._matchers.renew(sequence):
                sequence.take_back()
                self._scheduler.confirm(sequence)
            else:
                self._fail(sequence, failures)
            return None
        if not sequence.is_verified:  # else what counts of it is known below
            self._scheduler.blocks.mark_computed(sequence, end)
        drafts = None if item.drafts is None else self._drafts.checked(item, item.drafts, group)
        output = sequence.accept(group.token_ids, group.stop_probs, group.logprobs, drafts)
        self._scheduler.count(sequence, len(output.token_ids))
        if sequence.is_verified:
            if item.drafts is not None:
                self._scheduler.confirm(sequence)
            self._scheduler.blocks.mark_computed(sequence, sequence.num_computed_slots)
            self._drafts.take(sequence, output, group)
        if self._matchers.has_failed(sequence):
            self._matchers.renew(sequence)
        if sequence.matcher is None or sequence.matcher.error is None:
            return output
        number = self._matchers.num_sound(sequence, len(output.token_ids))
        self._fail(sequence, failures)
        return output.first(number) if number else None

    def _fail(self, sequence: Sequence, failures: list[RequestFailed]) -> None:
        """Its matcher has an error."""
        why = "" if sequence.matcher is None else sequence.matcher.error
        failures.append(RequestFailed(sequence.request_id, "grammar", f"{why}."))
        self._matchers.give_up(sequence)
        self._scheduler.remove(sequence.request_id)
