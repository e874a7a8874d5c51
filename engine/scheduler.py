"""Scheduler: which slots the next step computes. No tensors, no clock, no IO.

There are no phases. A sequence has `num_slots` slots, of which `num_computed_slots` are in the KV pool. Every step lets
it catch up within the step's budget, and when the two are equal it emits a group, which is one slot more to compute. So
a prompt, one decoded group and a replay after a preemption are the same thing.

    waiting (never ran)   ->  running (holds blocks)  ->  finished or aborted
                                 |        ^
                                 v        |
                              preempted (holds none, replays its groups, goes before all that wait)

Invariant: preempted and waiting requests were all submitted after the running ones, each list in order of arrival.
Progress: the oldest running sequence gets slots in every step, and blocks from the newest if need be; the pool holds
any one sequence as a whole (EngineConfig checks it). So everything admitted finishes.
"""

from __future__ import annotations

from collections import deque

from hamburger.engine.batch import ScheduledBatch, ScheduledSequence
from hamburger.engine.block_manager import BlockManager
from hamburger.engine.config import EngineConfig
from hamburger.engine.sequence import Sequence


class Scheduler:
    def __init__(self, config: EngineConfig) -> None:
        self.blocks = BlockManager(config.num_blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.running: list[Sequence] = []
        self.preempted: deque[Sequence] = deque()
        self.waiting: deque[Sequence] = deque()
        self._config = config
        self._sequences: dict[str, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.preempted)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def request_ids(self) -> list[str]:
        """All unfinished requests."""
        return list(self._sequences)

    def add(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise ValueError(f"request id {sequence.request_id} is in use.")
        self._sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def remove(self, request_id: str) -> None:
        """Forget a finished or aborted request and free its blocks. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        for queue in (self.running, self.preempted, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                break
        self.blocks.free(sequence)

    def expire(self, now: float) -> list[Sequence]:
        """Remove and return the requests that never ran and waited longer than max_queue_seconds."""
        expired = []
        while self.waiting and now - self.waiting[0].arrival_time > self._config.max_queue_seconds:
            sequence = self.waiting.popleft()
            del self._sequences[sequence.request_id]
            expired.append(sequence)
        return expired

    def schedule(self, now: float) -> ScheduledBatch:
        """Choose the next step's slots: one for each decoding sequence, then the unfinished prefills in order of
        arrival, then new sequences, until max_num_batched_slots are taken. `now` marks when a sequence first ran."""
        scheduled: list[ScheduledSequence] = []
        preempted: list[Sequence] = []
        num_decodes = sum(_is_decode(sequence) for sequence in self.running)
        spare_slots = self._config.max_num_batched_slots - num_decodes
        index = queries = hits = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            # Blocks are taken from the newest sequences, which have not been scheduled yet; the last is `sequence`.
            while not self.blocks.grow(sequence, sequence.num_slots):
                victim = self.running.pop()
                spare_slots += _is_decode(victim)
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                if _is_decode(sequence):
                    scheduled.append(_chunk(sequence, 1))
                elif spare_slots > 0:
                    scheduled.append(_chunk(sequence, spare_slots))
                    spare_slots -= scheduled[-1].num_slots
        while not preempted and spare_slots > 0 and len(self.running) < self._config.max_num_seqs:
            queue = self.preempted or self.waiting
            # All blocks of the prompt or replay at once, and one more left free for each running sequence: what was
            # just preempted does not come back only to be preempted again before others have freed some.
            if not queue or not self.blocks.admit(queue[0], reserve=len(self.running)):
                break
            sequence = queue.popleft()
            self.running.append(sequence)
            if self._config.prefix_cache:
                queries += sequence.num_slots
                hits += sequence.num_computed_slots
            if sequence.scheduled_time is None:
                sequence.scheduled_time = now
                sequence.num_cached_slots = sequence.num_computed_slots
            scheduled.append(_chunk(sequence, spare_slots))
            spare_slots -= scheduled[-1].num_slots
        scheduled.sort(key=lambda item: item.num_slots > 1)  # stable: the order of arrival stays within both parts
        return ScheduledBatch(scheduled, preempted, queries, hits)

    def _preempt(self, sequence: Sequence) -> None:
        """Recompute later: drop the KV, keep the groups, and wait before all others."""
        self.blocks.free(sequence)
        sequence.num_computed_slots = 0
        self.preempted.appendleft(sequence)

    def check_integrity(self) -> None:
        """Raise RuntimeError when blocks leaked or a sequence is in the wrong place; for tests and bug hunts."""
        self.blocks.check_integrity()
        placed = [*self.running, *self.preempted, *self.waiting]
        if placed != list(self._sequences.values()):
            raise RuntimeError("running, preempted and waiting sequences are not all requests in order of arrival.")
        if any(s.block_ids or s.num_computed_slots for s in (*self.preempted, *self.waiting)):
            raise RuntimeError("a sequence that does not run holds blocks or computed slots.")
        if not self._sequences and self.blocks.used_slots:
            raise RuntimeError("blocks are held without any request.")


def _is_decode(sequence: Sequence) -> bool:
    """One slot to go: a newest group, or the last slot of a prompt or replay."""
    return sequence.num_slots - sequence.num_computed_slots == 1


def _chunk(sequence: Sequence, spare_slots: int) -> ScheduledSequence:
    remaining = sequence.num_slots - sequence.num_computed_slots
    emits = remaining <= spare_slots and not sequence.is_prompt_only
    return ScheduledSequence(sequence, min(remaining, spare_slots), emits)
