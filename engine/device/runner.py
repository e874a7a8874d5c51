"""Runner: ScheduledBatch -> ForwardBatch -> StepOutput -> groups (running_step.py).

It keeps nothing about requests between steps: what a step needs is read from the sequences, and of a step that still
runs, from its RunningStep.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import TypeVar

from hamburger.engine.core.batch import BatchResult, ScheduledBatch, SettlingChunk
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.device.constraint import GrammarConstraint
from hamburger.engine.device.cpu_threads import StepThreads
from hamburger.engine.device.running_step import EmittingRow, RunningStep, rows_of
from hamburger.engine.device.sampling_rows import SamplingRows
from hamburger.engine.device.staged import Staged
from hamburger.engine.types.errors import OutOfMemory
from hamburger.engine.types.messages import Groups
from hamburger.model.batch import ForwardBatch, LoraSlots, ScoredSlots
from hamburger.model.device.devices import make_current
from hamburger.model.device.out_of_memory import out_of_memory_reason, release_cached_memory
from hamburger.model.device.overlapped import OverlapLinks, StepTail, fill_in_groups
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rope_scaling import DynamicRopeScaling
from hamburger.model.slot_choice import SlotChoice
from hamburger.model.steps import Steps

T = TypeVar("T")


class Runner:
    """Runs scheduled batches by one model's steps, on one KV cache."""

    def __init__(
        self,
        steps: Steps,
        cache: PagedKVCache,
        threads: StepThreads | None = None,
        groups: Groups = "composed",
        choice: SlotChoice | None = None,
    ) -> None:
        """threads: of a CPU; None leaves them. choice: wanted where answers settle."""
        self._verifies = groups == "verified"
        self._steps, self._config = steps, steps.config
        self._cache, self._threads, self._choice = cache, threads, choice
        self._device = steps.device
        self._staged = Staged(self._device)
        self._sampling = SamplingRows(self._device, steps.config.trunk.vocab_size, is_verified=self._verifies)
        self._needs_text_lengths = isinstance(steps.config.trunk.rope_scaling, DynamicRopeScaling)
        self._short_list = None if steps.short_list is None else frozenset(steps.short_list.tolist())

    def run(self, batch: ScheduledBatch) -> BatchResult:
        """Compute every scheduled slot, and score the prompt tokens that Sequence.unscored names.

        Raises OutOfMemory where the device has none left; nothing of the sequences has changed then.
        """
        return self.launch(batch).result()

    def settle(self, chunk: SettlingChunk) -> None:
        """Choose which of a chunk's tokens stay, in each layer and KV head, and move what is in the slots. Raises
        OutOfMemory; what is in the slots, nobody knows then."""
        if self._choice is None:
            raise RuntimeError("nothing chooses which slots stay, so nothing can settle.")
        of = (self._cache, chunk.candidates, chunk.positions, chunk.kept_at, chunk.moves)
        self._in_memory(partial(self._choice.settle, *of))

    def launch(self, batch: ScheduledBatch) -> RunningStep:
        """The same, without waiting for it where the model does not wait for the device itself. Memory is taken here,
        none by the result."""
        return self.launch_behind(None, batch)

    def launch_behind(self, previous: RunningStep | None, batch: ScheduledBatch) -> RunningStep:
        """Launch a batch whose linked rows (RunningStep) the previous step feeds. Raises OutOfMemory."""
        return self._in_memory(partial(self._launch, previous, batch))

    def _in_memory(self, compute: Callable[[], T]) -> T:
        """What it returns. Raises OutOfMemory where the device has none left."""
        make_current(self._device)  # a process may have models on several, and steps in another thread than it built in
        try:
            return compute()
        except Exception as error:
            reason = out_of_memory_reason(error)
            if reason is None:
                raise
        # Only here, when the error with its frames, and with it what they held, is gone.
        release_cached_memory(self._device)
        raise OutOfMemory(f"The device has not enough memory: {reason}")

    def _launch(self, previous: RunningStep | None, batch: ScheduledBatch) -> RunningStep:
        self._staged = Staged(self._device)
        rows = [row for item in batch.sequences if item.emits for row in rows_of(item)]
        constraint = self._constraint(rows)
        forward = self._forward_batch(batch, rows, constraint)
        tokens_left = self._staged.ints([row.sequence.num_tokens_left for row in rows])
        links = None if previous is None else self._links(batch, previous.emitting)
        self._staged.send()
        if previous is not None and links is not None:
            forward, tokens_left = fill_in_groups(forward, tokens_left, links, previous.tail, self._config.max_group)
        decodes = forward.num_single == len(forward.query_slots)
        try:
            with nullcontext() if self._threads is None else self._threads.step(decodes=decodes):
                output = self._steps.step(forward, self._cache)
        finally:
            if constraint is not None:
                constraint.restore()
        return RunningStep(self.launch_behind, batch, StepTail(forward, output, tokens_left))

    def _links(self, batch: ScheduledBatch, sources: list[Sequence]) -> OverlapLinks | None:
        """The linked rows of a batch; sources: the emitting rows of the step before. None where no row is."""
        source_of = {sequence: row for row, sequence in enumerate(sources)}
        # A linked row brings one slot, so it comes before all that bring several: its slot and its row have its index.
        linked_rows = [row for row, item in enumerate(batch.sequences) if item.sequence.awaits_group]
        if not linked_rows:
            return None
        emitting_before = list(accumulate((item.emits for item in batch.sequences), initial=0))
        return OverlapLinks(
            slots=self._staged.ints(linked_rows),
            rows=self._staged.ints([emitting_before[row] for row in linked_rows]),
            sources=self._staged.ints([source_of[batch.sequences[row].sequence] for row in linked_rows]),
        )

    def _constraint(self, rows: list[EmittingRow]) -> GrammarConstraint | None:
        """The rows with a grammar or token rules; None when no row has any."""
        guided = {
            row: (of.sequence.matcher, of.drafts) for row, of in enumerate(rows) if of.sequence.matcher is not None
        }
        if not guided:
            return None
        return GrammarConstraint(guided, self._config.trunk.vocab_size, self._device)

    def _forward_batch(
        self, batch: ScheduledBatch, rows: list[EmittingRow], constraint: GrammarConstraint | None
    ) -> ForwardBatch:
        size = self._cache.block_size
        tokens: list[list[int]] = []
        positions: list[int] = []
        text_lengths: list[int] = []
        write_slots: list[int] = []
        emit: list[int] = []
        query_slots: list[int] = []
        context_slots: list[int] = []
        settled: list[tuple[int, int]] = []
        blocks: list[list[int]] = []
        of_loras: dict[int, list[int]] = {}
        for item in batch.sequences:
            sequence = item.sequence
            first = sequence.num_computed_slots
            drafts = [] if item.drafts is None else item.drafts.token_ids
            query_slots += [item.num_slots] + [1] * len(drafts)
            context_slots += range(first + item.num_slots, first + item.num_rows + 1)
            blocks += [sequence.block_ids] * (1 + len(drafts))
            settled += [(len(sequence.prompt_ids), sequence.num_kept)] * (1 + len(drafts))
            if sequence.lora:
                of_loras.setdefault(sequence.lora, []).extend(range(len(tokens), len(tokens) + item.num_rows))
            for slot in range(first, first + item.num_rows):
                if slot >= first + item.num_slots:
                    tokens.append([drafts[slot - first - item.num_slots]])
                    positions.append(sequence.num_tokens + slot - first - item.num_slots)
                elif sequence.awaits_group:  # it is filled in on the device (fill_in_groups)
                    tokens.append([0])
                    positions.append(0)
                else:
                    tokens.append(list(sequence.slot_tokens(slot)))
                    positions.append(sequence.slot_position(slot))
                if self._needs_text_lengths:
                    text_lengths.append(max(len(sequence.prompt_ids), positions[-1] + 1))
                write_slots.append(sequence.block_ids[slot // size] * size + slot % size)
            if item.emits:
                emit += range(len(tokens) - 1 - len(drafts), len(tokens))
        limits = [self._group_limit(row) for row in rows]
        confidences = [_confidence(row) for row in rows]
        longest = [limit if confidence < 1 else 1 for limit, confidence in zip(limits, confidences, strict=True)]
        sizes = [len(group) for group in tokens]
        lends = self._cache.lends and any(number for _, number in settled)
        return ForwardBatch(
            token_ids=self._staged.padded(tokens, 0),
            group_sizes=self._staged.ints(sizes),
            max_group_size=max(sizes),
            positions=self._staged.ints(positions),
            write_slots=self._staged.ints(write_slots),
            block_tables=self._staged.padded(blocks, 0),
            context_slots=self._staged.ints(context_slots),
            query_slots=query_slots,
            context_slots_host=context_slots,
            num_single=sum(number == 1 for number in query_slots),
            emit=self._staged.ints(emit),
            confidence=self._staged.floats(confidences),
            group_limits=self._staged.ints(limits),
            max_group_limit=max(longest, default=1),
            max_free_limit=max(
                (n for n, row in zip(longest, rows, strict=True) if row.sequence.matcher is None), default=1
            ),
            sampling=self._sampling.batch(rows, constraint, self._staged),
            scored=self._scored_slots(batch),
            text_lengths=self._staged.ints(text_lengths) if self._needs_text_lengths else None,
            checks=self._staged.ints([row.check for row in rows]) if self._verifies else None,
            settled_from=self._staged.ints([first for first, _ in settled]) if lends else None,
            settled_slots=self._staged.ints([number for _, number in settled]) if lends else None,
            loras=tuple(LoraSlots(number, self._staged.ints(slots)) for number, slots in of_loras.items()),
        )

    def _scored_slots(self, batch: ScheduledBatch) -> ScoredSlots | None:
        rows: list[int] = []
        next_ids: list[int] = []
        max_logprobs = start = 0
        for item in batch.sequences:
            sequence = item.sequence
            for token in sequence.unscored(item.num_slots):
                rows.append(start + token - 1 - sequence.num_computed_slots)  # the slot before it predicts it
                next_ids.append(sequence.prompt_ids[token])
            max_logprobs = max(max_logprobs, sequence.params.prompt_logprobs or 0)
            start += item.num_rows
        if not rows:
            return None
        max_logprobs = min(max_logprobs, self._config.trunk.vocab_size)
        return ScoredSlots(self._staged.ints(rows), self._staged.ints(next_ids), max_logprobs)

    def _group_limit(self, row: EmittingRow) -> int:
        """Most tokens of the next group: with verified ones the row's own and drafts. Where a micro-step's short list
        may lack what is wanted, or hold nothing that is allowed, all tokens of composed ones are left to the trunk."""
        sequence = row.sequence
        if self._verifies:
            # What comes after this row's token and a draft of each place must have one place left.
            left = sequence.num_tokens_left - len(row.drafts)
            return max(1, min(self._config.max_group, 1 + row.item.max_drafts, left - 1))
        p = sequence.params
        if self._short_list is not None and (
            any(p.logit_bias.values())
            or (sequence.num_output_tokens < p.min_tokens and self._short_list <= sequence.end_token_ids)
        ):
            return 1
        return min(self._config.max_group, sequence.num_tokens_left)


def _confidence(row: EmittingRow) -> float:
    """The request's confidence, which its client filled in; with verified groups the chance that drafts must have."""
    confidence = row.sequence.params.confidence
    if confidence is None:
        raise RuntimeError(f"{row.sequence.request_id} reached the runner without a confidence.")
    return row.item.min_chance if row.sequence.is_verified and confidence < 1 else confidence
