"""ParallelSteps: the macro-steps of a model of which each rank holds a part (shard.py), for tensor parallelism.

Rank 0 alone decides: it gathers the logits, samples, masks by grammars and reads the stop head, and tells the others
which rows go on with which tokens, one small broadcast a micro-step. So nothing depends on all ranks computing the
same bits, and neither sampling state nor grammars leave rank 0.

    rank 0    shape ─► batch ─► trunk ─► gather, choose ─► rows and tokens ─► micro-step ─► ... ─► nobody goes on
    others        shape ─► batch ─► trunk ─► gather ────────► rows and tokens ─► micro-step ─► ... ─► next shape

A step that the memory of any rank does not hold ends on all of them: step_calls.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hamburger.model.backend import TorchBackend
from hamburger.model.batch import ForwardBatch, Reads, ScoredSlots, StepOutput, empty_sampling
from hamburger.model.device.out_of_memory import out_of_memory_reason, release_cached_memory
from hamburger.model.emission.emission import Emission
from hamburger.model.emission.narrowing import NarrowingEmission
from hamburger.model.emission.scoring import SCORED_ROWS_AT_ONCE, reads_of
from hamburger.model.group_cache import GroupCache
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.lora import Loras
from hamburger.model.parallel.shard import Shard
from hamburger.model.parallel.step_calls import NOT_ON
from hamburger.model.parallel.step_shape import StepShape
from hamburger.model.steps import EagerSteps

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class ParallelSteps:
    """Rank 0 calls `lead` once, then `step`; the others `follow` each step. A Steps (model/steps.py)."""

    _announce: Callable[[StepShape], None]

    def __init__(self, local: TorchBackend, shard: Shard) -> None:
        """local: computes this rank's part, and speaks with the others by the shard's parts."""
        self.shard, self._local = shard, local
        backend = _LeadingBackend(local, shard)
        groups = _LeadingEmission(NarrowingEmission(backend), shard)
        self._eager = EagerSteps(backend, [groups])
        self.config, self.trunk_config = local.config, local.trunk_config
        self.device, self.state_dtype = local.device, local.state_dtype
        self.quantization, self.short_list = local.quantization, local.short_list
        self.loras: Loras | None = None  # ranks are not told which rows pass which

    def lead(self, announce: Callable[[StepShape], None]) -> None:
        """Rank 0: `announce` tells the other ranks' hosts of each step; they must `follow` then."""
        self._announce = announce

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """As of Steps. Raises torch.OutOfMemoryError where the memory of any rank does not hold the step; all ranks are
        ready for the next one then."""
        shape = self._shape_of(batch)
        values = torch.cat([part.flatten() for part in _parts(batch)])
        self._announce(shape)  # memory that ends before this is nobody else's concern
        self.shard.calls.begin(shape)
        self.shard.calls.share_batch(values)
        return self._in_step(partial(self._eager.step, batch, cache))

    @torch.inference_mode()
    def follow(self, shape: StepShape, cache: PagedKVCache) -> None:
        """The other ranks' part in the step that rank 0 has announced."""
        self.shard.calls.begin(shape)
        with suppress(torch.OutOfMemoryError):  # rank 0 has heard of it
            self._in_step(partial(self._follow, shape, cache))

    def _in_step(self, compute: Callable[[], _Result]) -> _Result:
        """This rank's part of the step whose calls have begun. Raises torch.OutOfMemoryError, and does on all ranks."""
        calls, reason = self.shard.calls, None
        try:
            result = compute()
            lacking = calls.agree()
        except Exception as error:
            reason = out_of_memory_reason(error)
            if reason is None:
                raise
        if reason is not None:  # and the error, with its frames and what they held, is gone
            release_cached_memory(self.device)
            logger.warning("Rank %d ran out of memory in a step: %s", calls.rank, reason)
            lacking = calls.abandon()
        if lacking:
            ranks = " and ".join(f"rank {rank}" for rank in lacking)
            raise torch.OutOfMemoryError(ranks if reason is None else f"{ranks}: {reason}")
        return result

    def _follow(self, shape: StepShape, cache: PagedKVCache) -> None:
        batch, local, emitting = self._receive(shape), self._local, shape.num_emitting
        hidden, features = local.trunk(batch, cache, reads_of(batch))
        if emitting:
            local.head(hidden[:emitting])
            if shape.max_group_limit > 1:
                self._follow_groups(features, batch.emit)
        if batch.scored is not None:
            for states in hidden[emitting:].split(SCORED_ROWS_AT_ONCE):
                local.head(states)

    def _follow_groups(self, features: list[Tensor], emit: Tensor) -> None:
        local, calls = self._local, self.shard.calls
        rows, cache = torch.arange(len(emit), device=emit.device), None
        while True:
            next_tokens = calls.share_rows(torch.empty_like(emit))
            on = (next_tokens != NOT_ON).nonzero().squeeze(-1)
            calls.go_on(len(on))
            if not len(on):
                return
            if cache is None:
                cache = local.begin_group(torch.stack(features, dim=1)[on])
            elif len(on) < len(rows):
                cache = cache.select(torch.searchsorted(rows, on))
            rows = on
            local.heads.micro(local.micro_state(next_tokens[on], cache))

    def _receive(self, shape: StepShape) -> ForwardBatch:
        sizes, device = shape.part_sizes, self.device
        values = self.shard.calls.share_batch(torch.empty(sum(sizes), dtype=torch.int64, device=device))
        tokens, group_sizes, positions, slots, tables, context, emit, scored, lengths = values.split(sizes)
        return ForwardBatch(
            token_ids=tokens.view(shape.num_slots, shape.max_group_size),
            group_sizes=group_sizes,
            max_group_size=shape.max_group_size,
            positions=positions,
            write_slots=slots,
            block_tables=tables.view(len(shape.query_slots), shape.table_width),
            context_slots=context,
            query_slots=shape.query_slots,
            context_slots_host=shape.context_slots_host,
            num_single=shape.num_single,
            emit=emit,
            # What chooses tokens and ends groups is rank 0's; nothing here reads these.
            confidence=torch.ones(len(emit), device=device),
            group_limits=torch.ones_like(emit),
            max_group_limit=shape.max_group_limit,
            sampling=empty_sampling(len(emit), device),
            scored=ScoredSlots(scored, scored, 0) if shape.num_scored else None,
            text_lengths=lengths if shape.has_text_lengths else None,
        )

    def _shape_of(self, batch: ForwardBatch) -> StepShape:
        assert batch.context_slots_host is not None  # static rows alone lack it
        has_adapter = self.config.adapter_rank > 0
        return StepShape(
            num_slots=len(batch.token_ids),
            num_composed=int((batch.group_sizes > 1).sum()) if has_adapter else 0,
            max_group_size=batch.max_group_size,
            query_slots=batch.query_slots,
            context_slots_host=batch.context_slots_host,
            num_single=batch.num_single,
            table_width=batch.block_tables.shape[1],
            num_emitting=len(batch.emit),
            max_group_limit=batch.max_group_limit,
            num_scored=0 if batch.scored is None else len(batch.scored.rows),
            has_text_lengths=batch.text_lengths is not None,
        )


class _LeadingBackend:
    """Rank 0's backend: another one, whose micro-steps it tells the other ranks of."""

    static = False

    def __init__(self, local: TorchBackend, shard: Shard) -> None:
        self._local, self._shard = local, shard
        self.config, self.trunk_config = local.config, local.trunk_config
        self.device, self.state_dtype = local.device, local.state_dtype
        self.quantization, self.short_list = local.quantization, local.short_list
        self.loras: Loras | None = None  # ranks are not told which rows pass which
        self.head, self.stop_logits = local.head, local.stop_logits
        self._num_emitting, self._rows = 0, torch.empty(0, dtype=torch.int64)

    def trunk(self, batch: ForwardBatch, cache: PagedKVCache, reads: Reads) -> tuple[Tensor, list[Tensor]]:
        self._num_emitting = len(batch.emit)
        return self._local.trunk(batch, cache, reads)

    def begin_group(self, features: Tensor, rows: Tensor | None = None) -> GroupCache:
        self._rows = torch.arange(self._num_emitting, device=self.device) if rows is None else rows
        return self._local.begin_group(features)

    def micro_step(self, tokens: Tensor, cache: GroupCache) -> tuple[Tensor, Tensor]:
        rows = cache.of_rows(self._rows)
        next_tokens = tokens.new_full((self._num_emitting,), NOT_ON).index_copy_(0, rows, tokens)
        self._shard.calls.share_rows(next_tokens)
        self._shard.calls.go_on(len(rows))
        return self._local.micro_step(tokens, cache)


class _LeadingEmission:
    """Rank 0's emission: another one, whose end it tells the other ranks of."""

    def __init__(self, groups: Emission, shard: Shard) -> None:
        self._groups, self._shard = groups, shard
        self.takes = groups.takes

    def emit(self, states: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        output = self._groups.emit(states, features, batch)
        if len(states) and batch.max_group_limit > 1:
            self._shard.calls.share_rows(torch.full_like(batch.emit, NOT_ON))
            self._shard.calls.go_on(0)
        return output


def _parts(batch: ForwardBatch) -> list[Tensor]:
    """What `_receive` takes apart: StepShape.part_sizes."""
    parts = [batch.token_ids, batch.group_sizes, batch.positions, batch.write_slots, batch.block_tables]
    parts += [batch.context_slots, batch.emit]
    if batch.scored is not None:
        parts.append(batch.scored.rows)
    if batch.text_lengths is not None:
        parts.append(batch.text_lengths)
    return parts
