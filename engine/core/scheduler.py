"""Scheduler: which slots the next step computes. No tensors, no clock, no IO.

There are no phases. A sequence has `num_slots` slots, of which `num_computed_slots` are in the KV pool. Every step lets
it catch up within the step's budget, and when the two are equal it emits a group, which is one slot more to compute. So
a prompt, one decoded group and a replay after a preemption are the same thing.

    waiting (holds no blocks)  ->  running (holds blocks)  ->  finished or aborted
                               <-
                           preemption: it replays its groups later

With verified groups a decoding sequence has rows beside that slot, drafts of what follows it (draft_rows.py). They take
what budget and blocks the step has left when all else is chosen; blocks that only rejected drafts have used are given
back as soon as that is known (`confirm`). So between steps slots and blocks are as they would be without drafts.

An answer's old tokens settle at fixed places (settling.py): no step computes slots before and behind one.

All sequences have one order (Sequence.rank): by priority, then as they first ran. Every step goes through them in it.
Who runs takes the blocks that it lacks from the last ones; who waits takes a seat and blocks only from those of a lower
priority, and until it has them nobody behind it starts. Who of those that never ran is next: waiting.py.

Invariants: the running are in that order; of one priority, all that run come before all that wait.
Progress: the first running sequence gets slots in every step, and the pool holds any one sequence as a whole
(EngineConfig checks it). So everything admitted finishes, once what has a higher priority has.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field

from hamburger.engine.core.batch import ScheduledBatch, ScheduledSequence
from hamburger.engine.core.block_manager import BlockManager
from hamburger.engine.core.draft_rows import with_drafts
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.core.waiting import OUTPUT_COST, WaitingQueue, rank
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.types.config import EngineConfig

_STEPS_UNTIL_LARGER = 64  # a step that does not fit costs a step and replays: at most one in so many may try the limit


class Scheduler:
    def __init__(self, config: EngineConfig, policy: DraftPolicy | None = None) -> None:
        """policy: of verified groups."""
        self._policy = policy
        self.blocks = BlockManager(config.num_blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self._config = config
        self._sequences: dict[str, Sequence] = {}
        self._never_ran: OrderedDict[str, Sequence] = OrderedDict()  # by arrival
        self._num_started = 0
        # Also the most running sequences. Below the config's only while memory is short.
        self._max_step_slots = config.max_num_batched_slots
        self._num_steps_that_fit = 0  # since the last one that memory did not hold

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def request_ids(self) -> list[str]:
        """All unfinished requests."""
        return list(self._sequences)

    def holds(self, sequence: Sequence) -> bool:
        """Whether this very sequence is unfinished; another may have its id meanwhile."""
        return self._sequences.get(sequence.request_id) is sequence

    def preempts_nobody(self) -> bool:
        """Whether `schedule` certainly takes no blocks and no seat from a running sequence."""
        head = self.waiting.head
        if head is not None and self.running and head.rank < self.running[-1].rank:
            return False
        # An admitted sequence leaves a block free for each running one.
        return self.blocks.can_grow(self.running)

    def add(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise ValueError(f"request id {sequence.request_id} is in use.")
        self._sequences[sequence.request_id] = self._never_ran[sequence.request_id] = sequence
        self.waiting.enter(sequence)

    def remove(self, request_id: str) -> None:
        """Forget a finished or aborted request and free its blocks. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        self._never_ran.pop(request_id, None)
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.waiting.leave(sequence)
        self.blocks.end(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """Remove and return the requests that never ran and waited longer than max_queue_seconds."""
        expired: list[Sequence] = []
        while self._never_ran:
            sequence = next(iter(self._never_ran.values()))
            if now - sequence.arrival_time <= self._config.max_queue_seconds:
                break
            self.remove(sequence.request_id)
            expired.append(sequence)
        return expired

    def schedule(self, now: float) -> ScheduledBatch:
        """Choose the next step's slots: one for each decoding sequence, and what is left of max_num_batched_slots for
        prompts and replays, in order. `now` marks when a sequence first ran."""
        num_decodes = sum(_is_decode(sequence) for sequence in self.running)
        # Alone, a prompt delays nobody.
        step = _StepPlan(self._max_step_slots - num_decodes, self._config.even_context if num_decodes else None)
        index, admits = 0, True
        while True:
            head = self.waiting.head if admits else None
            if index < len(self.running) and (head is None or self.running[index].rank < head.rank):
                sequence = self.running[index]
                # What was just preempted does not come back only to be preempted again before others have freed some.
                admits &= self._grow(sequence, step)
                if sequence.block_ids:
                    step.schedule(sequence)
                    index += 1
            elif head is not None:
                admits = self._admit(head, index, step)
                if admits:
                    self._start(head, now, step)
                    index += 1
            else:
                break
        # Stable: the order stays within both parts.
        scheduled = sorted(step.scheduled, key=lambda item: item.num_slots > 1)
        if self._policy is not None and any(item.emits for item in scheduled):
            scheduled = with_drafts(scheduled, self._policy, self.blocks, self._max_step_slots, self._config.max_group)
        return ScheduledBatch(scheduled, step.preempted, step.cache_queries, step.cache_hits)

    def count(self, sequence: Sequence, num_tokens: int) -> None:
        """It has got so many tokens of its answer."""
        self.waiting.charge(sequence, OUTPUT_COST * num_tokens)

    def confirm(self, sequence: Sequence) -> None:
        """It has accepted what a step confirmed: blocks that only its rejected drafts needed are given back."""
        self.blocks.shrink(sequence, sequence.num_slots)

    def shrink(self, batch: ScheduledBatch) -> list[Sequence]:
        """Memory did not hold a step of this batch's size (above 1 slot): the next ones have half of its slots at most,
        and the last running sequences that these cannot serve are preempted. Returns those."""
        self._max_step_slots, self._num_steps_that_fit = batch.num_rows // 2, 0
        for item in batch.sequences:
            if item.drafts is not None:  # nothing of them is confirmed
                self.confirm(item.sequence)
        step = _StepPlan(0)
        while len(self.running) > self._max_step_slots:
            self._preempt(self.running[-1], step)
        return step.preempted

    def recover(self) -> None:
        """Memory held a step: after some of them the next ones may be a little larger, up to what is configured."""
        self._num_steps_that_fit += 1
        if self._num_steps_that_fit % _STEPS_UNTIL_LARGER == 0:
            more = max(1, self._max_step_slots // 8)
            self._max_step_slots = min(self._max_step_slots + more, self._config.max_num_batched_slots)

    def _grow(self, sequence: Sequence, step: _StepPlan) -> bool:
        """Give a running sequence its blocks, from the last ones that run if need be; the very last may be itself.

        Returns whether nothing had to be preempted.
        """
        preempted = False
        while not self.blocks.grow(sequence, sequence.num_slots):
            victim, preempted = self.running[-1], True
            self._preempt(victim, step)
            if victim is sequence:
                break
        return not preempted

    def _admit(self, head: Sequence, index: int, step: _StepPlan) -> bool:
        """Give a waiting sequence a seat and its blocks, if need be those of sequences from running[index] on: all of
        them have a lower priority, and none of them is in this step yet. Returns False, and changes nothing, if even
        those are not enough."""
        if head in step.preempted:
            return False
        for num_kept in range(len(self.running), index - 1, -1):
            victims = self.running[num_kept:]
            spare_slots = step.spare_slots + sum(_is_decode(victim) for victim in victims)
            # All blocks of the prompt or replay at once, and one more left free for each that runs.
            seats = min(self._config.max_num_seqs, self._max_step_slots)
            if spare_slots > 0 and num_kept < seats and self.blocks.fits(head, num_kept, victims):
                for victim in reversed(victims):
                    self._preempt(victim, step)
                self.blocks.admit(head)
                return True
        return False

    def _start(self, sequence: Sequence, now: float, step: _StepPlan) -> None:
        """An admitted sequence runs, and takes part in this step."""
        self.waiting.remove(sequence)
        if sequence.scheduled_time is None:
            self._num_started += 1
            sequence.rank = (sequence.priority, self._num_started)
        insort(self.running, sequence, key=rank)
        if self._config.prefix_cache:
            step.cache_queries += sequence.num_slots
            step.cache_hits += sequence.num_computed_slots
        if sequence.scheduled_time is None:
            del self._never_ran[sequence.request_id]
            sequence.scheduled_time = now
            sequence.num_cached_slots = sequence.num_computed_slots
            self.waiting.charge(sequence, sequence.num_slots - sequence.num_computed_slots)
        step.schedule(sequence, is_new=True)

    def _preempt(self, sequence: Sequence, step: _StepPlan) -> None:
        """Recompute later: drop the KV, keep the groups."""
        step.spare_slots += _is_decode(sequence)
        step.preempted.append(sequence)
        self.running.remove(sequence)
        self.blocks.free(sequence)
        sequence.forget_slots()
        self.waiting.put_back(sequence)

    def check_integrity(self) -> None:
        """Raise RuntimeError when blocks leaked or a sequence is in the wrong place; for tests and bug hunts."""
        self.blocks.check_integrity()
        placed = [*self.running, *self.waiting]
        if len(placed) != len(self._sequences) or {*placed} != {*self._sequences.values()}:
            raise RuntimeError("running and waiting sequences are not all requests.")
        if self.running != sorted(self.running, key=rank):
            raise RuntimeError("running sequences are not in order.")
        first = {s.priority: s.rank for s in reversed([*self.waiting])}
        if any(s.rank > first.get(s.priority, s.rank) for s in self.running):
            raise RuntimeError("a sequence runs before one of its priority that came earlier.")
        if any(s.block_ids or s.num_computed_slots for s in self.waiting):
            raise RuntimeError("a sequence that does not run holds blocks or computed slots.")
        if [*self._never_ran.values()] != [s for s in self._sequences.values() if s.scheduled_time is None]:
            raise RuntimeError("the requests that never ran are not those that are listed.")
        if not self._sequences and self.blocks.used_slots:
            raise RuntimeError("blocks are held without any request.")


@dataclass(slots=True)
class _StepPlan:
    """The next step, as far as it is chosen. spare_slots: of the budget, without one for each decode still to come.
    even_context: of EngineConfig, where it counts."""

    spare_slots: int
    even_context: int | None = None
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    cache_queries: int = 0
    cache_hits: int = 0

    def schedule(self, sequence: Sequence, *, is_new: bool = False) -> None:
        """Take a running sequence in, as far as the budget reaches."""
        remaining = sequence.num_slots - sequence.num_computed_slots
        # What a slot takes of the budget: more, the more of its context attention reads.
        cost = 1.0 if self.even_context is None else 1 + sequence.num_computed_slots / self.even_context
        most = min(math.ceil(self.spare_slots / cost), sequence.num_slots_at_once)
        num_slots = 1
        if is_new or remaining != 1:  # else one was left for it
            num_slots = min(remaining, most)
            self.spare_slots -= min(self.spare_slots, math.ceil(num_slots * cost))
        if num_slots:
            emits = num_slots == remaining and not sequence.is_prompt_only
            self.scheduled.append(ScheduledSequence(sequence, num_slots, emits))


def _is_decode(sequence: Sequence) -> bool:
    """One slot to go: a newest group, or the last slot of a prompt or replay."""
    return sequence.num_slots - sequence.num_computed_slots == 1
