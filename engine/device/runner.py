"""Runner: ScheduledBatch -> ForwardBatch -> StepOutput -> groups (running_step.py).

It keeps nothing about requests between steps: what a step needs is read from the sequences, and of a step that still
runs, from its RunningStep.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from hamburger.engine.core.batch import BatchResult, ScheduledBatch
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.device.constraint import GrammarConstraint
from hamburger.engine.device.cpu_threads import StepThreads
from hamburger.engine.device.running_step import RunningStep
from hamburger.engine.types.errors import OutOfMemory
from hamburger.model.batch import Adjustments, ForwardBatch, SamplingBatch, ScoredSlots, StepOutput
from hamburger.model.config import DynamicRopeScaling
from hamburger.model.device.out_of_memory import let_go, no_memory
from hamburger.model.device.overlapped import Links, Tail, chained
from hamburger.model.device.staging import Staging
from hamburger.model.graphs.decode_graphs import DecodeGraphs
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache

_LARGE_TABLE = 1024  # entries


class Runner:
    """Runs scheduled batches on one model and one KV cache."""

    def __init__(
        self,
        model: HamburgerModel,
        cache: PagedKVCache,
        graphs: DecodeGraphs | None = None,
        threads: StepThreads | None = None,
    ) -> None:
        """graphs: of this model and cache, for the batches that they can take. threads: of a CPU; None leaves them."""
        self._model = model
        self._graphs = graphs
        self._cache, self._threads = cache, threads
        self._device = model.embed_tokens.weight.device
        self._staging = Staging(self._device)
        self._needs_text_lengths = isinstance(model.config.trunk.rope_scaling, DynamicRopeScaling)
        graft = model.config.graft
        has_short_list = graft is not None and graft.short_list_size is not None
        self._short_list = frozenset(model.short_list.tolist()) if has_short_list else None

    def run(self, batch: ScheduledBatch) -> BatchResult:
        """Compute every scheduled slot, and score the prompt tokens that Sequence.unscored names.

        Raises OutOfMemory where the device has none left; nothing of the sequences has changed then.
        """
        return self.launch(batch).result()

    def launch(self, batch: ScheduledBatch) -> RunningStep:
        """The same, without waiting for it where the model does not wait for the device itself. Memory is taken here,
        none by the result."""
        return self.launch_behind(None, batch)

    def launch_behind(self, previous: RunningStep | None, batch: ScheduledBatch) -> RunningStep:
        """Launch a batch whose chained rows (RunningStep) the previous step feeds. Raises OutOfMemory."""
        try:
            return self._launch(previous, batch)
        except Exception as error:
            reason = no_memory(error)
            if reason is None:
                raise
        let_go(self._device)  # only here, when the error with its frames, and with it what they held, is gone
        raise OutOfMemory(f"The device has not enough memory: {reason}")

    def _launch(self, previous: RunningStep | None, batch: ScheduledBatch) -> RunningStep:
        self._staging = Staging(self._device)
        emitting = [item.sequence for item in batch.sequences if item.emits]
        constraint = self._constraint(emitting)
        forward = self._forward_batch(batch, constraint)
        tokens_left = self._ints([sequence.num_tokens_left for sequence in emitting])
        links = None if previous is None else self._links(batch, previous.emitting)
        self._staging.send()
        if previous is not None and links is not None:
            forward, tokens_left = chained(forward, tokens_left, links, previous.tail, self._model.config.max_group)
        decodes = forward.num_single == len(forward.query_slots)
        try:
            with nullcontext() if self._threads is None else self._threads.step(decodes=decodes):
                output = self._step(forward)
        finally:
            if constraint is not None:
                constraint.restore()
        return RunningStep(self.launch_behind, batch, Tail(forward, output, tokens_left))

    def _step(self, batch: ForwardBatch) -> StepOutput:
        return (self._graphs or self._model).step(batch, self._cache)

    def _links(self, batch: ScheduledBatch, sources: list[Sequence]) -> Links | None:
        """The chained rows of a batch; sources: the emitting rows of the step before. None where no row is."""
        source_of = {sequence: row for row, sequence in enumerate(sources)}
        # A chained row brings one slot, so it comes before all that bring several: its slot and its row have its index.
        chained_rows = [row for row, item in enumerate(batch.sequences) if item.sequence.awaits_group]
        if not chained_rows:
            return None
        emitting_before = list(accumulate((item.emits for item in batch.sequences), initial=0))
        return Links(
            slots=self._ints(chained_rows),
            rows=self._ints([emitting_before[row] for row in chained_rows]),
            sources=self._ints([source_of[batch.sequences[row].sequence] for row in chained_rows]),
        )

    def _constraint(self, emitting: list[Sequence]) -> GrammarConstraint | None:
        """The rows with a grammar; None when no row has one."""
        matchers = {row: s.matcher for row, s in enumerate(emitting) if s.matcher is not None}
        if not matchers:
            return None
        return GrammarConstraint(matchers, self._model.config.trunk.vocab_size, self._device)

    def _forward_batch(self, batch: ScheduledBatch, constraint: GrammarConstraint | None) -> ForwardBatch:
        size = self._cache.block_size
        tokens: list[list[int]] = []
        positions: list[int] = []
        text_lengths: list[int] = []
        write_slots: list[int] = []
        emit: list[int] = []
        for item in batch.sequences:
            sequence = item.sequence
            first = sequence.num_computed_slots
            for slot in range(first, first + item.num_slots):
                if sequence.awaits_group:  # it is filled in on the device (chain.py)
                    tokens.append([0])
                    positions.append(0)
                else:
                    tokens.append(list(sequence.slot_tokens(slot)))
                    positions.append(sequence.slot_position(slot))
                if self._needs_text_lengths:
                    text_lengths.append(max(len(sequence.prompt_ids), positions[-1] + 1))
                write_slots.append(sequence.block_ids[slot // size] * size + slot % size)
            if item.emits:
                emit.append(len(tokens) - 1)
        emitting = [item.sequence for item in batch.sequences if item.emits]
        context_slots = [item.sequence.num_computed_slots + item.num_slots for item in batch.sequences]
        blocks = [item.sequence.block_ids for item in batch.sequences]
        limits = [self._group_limit(sequence) for sequence in emitting]
        confidences = [_confidence(sequence) for sequence in emitting]
        longest = [limit if confidence < 1 else 1 for limit, confidence in zip(limits, confidences, strict=True)]
        sizes = [len(group) for group in tokens]
        return ForwardBatch(
            token_ids=self._padded(tokens, 0),
            group_sizes=self._ints(sizes),
            max_group_size=max(sizes),
            positions=self._ints(positions),
            write_slots=self._ints(write_slots),
            block_tables=self._padded(blocks, 0),
            context_slots=self._ints(context_slots),
            query_slots=[item.num_slots for item in batch.sequences],
            context_slots_host=context_slots,
            num_single=sum(item.num_slots == 1 for item in batch.sequences),
            emit=self._ints(emit),
            confidence=self._floats(confidences),
            group_limits=self._ints(limits),
            max_group_limit=max(longest, default=1),
            max_free_limit=max((n for n, s in zip(longest, emitting, strict=True) if s.matcher is None), default=1),
            sampling=self._sampling_batch(emitting, constraint),
            scored=self._scored_slots(batch),
            text_lengths=self._ints(text_lengths) if self._needs_text_lengths else None,
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
            start += item.num_slots
        if not rows:
            return None
        max_logprobs = min(max_logprobs, self._model.config.trunk.vocab_size)
        return ScoredSlots(self._ints(rows), self._ints(next_ids), max_logprobs)

    def _group_limit(self, sequence: Sequence) -> int:
        """Most tokens of the next group. Where a micro-step's short list may lack what is wanted, or hold nothing that
        is allowed, all tokens are left to the trunk."""
        p = sequence.params
        if self._short_list is not None and (
            p.logit_bias or (sequence.num_output_tokens < p.min_tokens and self._short_list <= sequence.end_token_ids)
        ):
            return 1
        return min(self._model.config.max_group, sequence.num_tokens_left)

    def _sampling_batch(self, emitting: list[Sequence], constraint: GrammarConstraint | None) -> SamplingBatch:
        params = [sequence.params for sequence in emitting]
        logprobs = [-1 if p.logprobs is None else p.logprobs for p in params]
        return SamplingBatch(
            temperature=self._floats([p.temperature for p in params]),
            top_k=self._ints([p.top_k for p in params]),
            top_p=self._floats([p.top_p for p in params]),
            min_p=self._floats([p.min_p for p in params]),
            seed=self._ints([p.seed or 0 for p in params]),
            output_index=self._ints([sequence.num_output_tokens for sequence in emitting]),
            end_ids=self._padded([sorted(sequence.end_token_ids) for sequence in emitting], -1),
            logprobs=self._ints(logprobs),
            any_sampled=any(not p.is_greedy for p in params),
            any_filtered=any(not p.is_greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params),
            max_logprobs=min(max(logprobs, default=-1), self._model.config.trunk.vocab_size),
            adjustments=self._adjustments(emitting),
            constraint=constraint,
        )

    def _adjustments(self, emitting: list[Sequence]) -> Adjustments | None:
        """The rows that ask for penalties, bias or min_tokens; None when no row does."""
        rows = [i for i, sequence in enumerate(emitting) if sequence.adjusts_logits]
        if not rows:
            return None
        chosen = [emitting[i] for i in rows]
        params = [sequence.params for sequence in chosen]
        bias = [(i, token_id, value) for i, p in enumerate(params) for token_id, value in p.logit_bias.items()]
        return Adjustments(
            row=self._ints(rows),
            # Only repetition_penalty looks at the prompt.
            prompt_ids=self._padded([s.prompt_ids if s.params.repetition_penalty != 1 else [] for s in chosen], -1),
            output_ids=self._padded([s.output_ids for s in chosen], -1),
            presence=self._floats([p.presence_penalty for p in params]),
            frequency=self._floats([p.frequency_penalty for p in params]),
            repetition=self._floats([p.repetition_penalty for p in params]),
            bias_row=self._ints([i for i, _, _ in bias]),
            bias_id=self._ints([token_id for _, token_id, _ in bias]),
            bias=self._floats([value for _, _, value in bias]),
            min_index=self._ints([p.min_tokens for p in params]),
        )

    def _ints(self, values: list[int]) -> Tensor:
        return self._staging.put(values, torch.int64)

    def _floats(self, values: list[float]) -> Tensor:
        return self._staging.put(values, torch.float32)

    def _padded(self, rows: list[list[int]], fill: int) -> Tensor:
        """int64 [len(rows), longest], right-padded with `fill`."""
        width = max((len(row) for row in rows), default=0)
        if len(rows) * width > _LARGE_TABLE:
            return self._staging.put(_filled_up(rows, width, fill).ravel(), torch.int64).view(len(rows), width)
        flat = [value for row in rows for value in (*row, *[fill] * (width - len(row)))]
        return self._ints(flat).view(len(rows), width)


def _filled_up(rows: list[list[int]], width: int, fill: int) -> np.ndarray:
    """int64 [len(rows), width]: what block tables of many long sequences need a third of the time for."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    table = np.full((len(rows), width), fill)
    table[np.arange(width) < lengths[:, None]] = np.fromiter(
        chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum())
    )
    return table


def _confidence(sequence: Sequence) -> float:
    """The request's confidence, which its client filled in."""
    if sequence.params.confidence is None:
        raise RuntimeError(f"{sequence.request_id} reached the runner without a confidence.")
    return sequence.params.confidence
