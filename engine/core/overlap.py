"""OverlappedCore: step k + 1 is scheduled, prepared and launched while step k still runs on the device.

A decoding sequence grows by exactly one slot a macro-step, whatever its group's size is. So the next step can be
planned without the groups of this one; what it lacks of them (tokens, sizes, positions) never leaves the device.

    host      launch k   launch k+1        result k, accept          launch k+2        result k+1, accept
    device    [-------------- step k --------------][----------------- step k+1 -----------------][---

Blocks. A step that is launched later runs later: a device works off one stream, in order. So what a sequence that ends
with step k has in the running step k + 1 is freed at once: whoever gets its blocks is launched behind the step that
still writes them. Nobody takes that slot for its own: a block is made known only when the step was accepted that filled
it, and then only if its sequence had not ended before.

Between two calls of `step` a sequence's groups and slots are as in EngineCore, but for the newest slot, which counts as
computed and is being computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from hamburger.engine.core.batch import BatchResult, LaunchedStep, Runner, ScheduledBatch
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.errors import OutOfMemory
from hamburger.engine.types.messages import StepOutputs

logger = logging.getLogger(__name__)

_STEPS_ALONE = 64  # after one that did not fit ahead of another, until the next is tried


class LaunchingRunner(Runner, Protocol):
    """A runner that need not wait for what it launches."""

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Begin to compute the batch's slots."""


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step that is launched and not accepted. ends: the slots that its sequences have in the pool after it."""

    batch: ScheduledBatch
    ends: list[int]
    running: LaunchedStep


class OverlappedCore(EngineCore):
    """EngineCore in another order: one call of `step` still reports one step.

    The texts are the same in float32; in bfloat16 other batches round otherwise.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: LaunchingRunner,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        loras: CoreLoras | None = None,
    ) -> None:
        super().__init__(config, runner, clock, grammars, loras=loras)
        self._launching_runner = runner
        self._pending: _PendingStep | None = None
        self._last_report = 0.0  # when the last step was
        self._num_steps_alone = 0  # still to run with nothing launched behind them, as memory did not hold it
        self._unreported_lookups = (0, 0)  # cache_queries and cache_hits of a batch that nobody accepted

    def step(self) -> StepOutputs:
        """Accept the step that runs (begun here if none does), after the next one was launched behind it."""
        start = self._clock()
        failures = self._expire(start)
        pending, self._pending = self._pending, None
        if pending is not None and any(self._scheduler.holds(item.sequence) for item in pending.batch.sequences):
            began = self._last_report
        else:  # nothing runs, or nothing that anybody still waits for
            if pending is not None:
                self._unreported_lookups = pending.batch.cache_queries, pending.batch.cache_hits
            batch = self._scheduler.schedule(start)
            (queries, hits), self._unreported_lookups = self._unreported_lookups, (0, 0)
            batch = replace(batch, cache_queries=batch.cache_queries + queries, cache_hits=batch.cache_hits + hits)
            if not batch.sequences:
                return self._accept(batch, [], BatchResult([]), failures, start)
            try:
                pending, began = self._launch(batch, self._launching_runner.launch), start
            except OutOfMemory as error:
                return self._accept(self._shrink(batch, error, failures), [], BatchResult([]), failures, start)
        self._pending = self._launch_behind(pending, start)
        outputs = self._accept(pending.batch, pending.ends, pending.running.result(), failures, began)
        self._last_report = self._clock()
        return outputs

    def _launch_behind(self, pending: _PendingStep, now: float) -> _PendingStep | None:
        """Launch the step after `pending`; nothing where it must know the groups first, or memory does not hold it."""
        if self._num_steps_alone:
            self._num_steps_alone -= 1
            return None
        items = [item for item in pending.batch.sequences if self._scheduler.holds(item.sequence)]
        # One token more ends an answer that has only one left: it takes no part in the next step.
        awaiting = [item.sequence for item in items if item.emits and item.sequence.num_tokens_left > 1]
        if any(_host_needs_group(sequence) for sequence in awaiting) or any(
            item.sequence.needs_all_slots for item in items
        ):
            return None
        for sequence in awaiting:
            sequence.awaits_group = True  # until it accepts it
        # A sequence whose newest group is unknown cannot be replayed; and this step may end some and free blocks.
        batch = self._scheduler.schedule(now) if self._scheduler.preempts_nobody() else None
        if batch is not None and batch.sequences:
            try:
                return self._launch(batch, pending.running.then)
            except OutOfMemory as error:  # it is planned anew, behind nothing: only then may it preempt
                logger.warning("A step of %d slots launched ahead ran out of memory: %s", batch.num_slots, error)
                self._num_steps_alone = _STEPS_ALONE
                self._unreported_lookups = batch.cache_queries, batch.cache_hits
        for sequence in awaiting:
            sequence.awaits_group = False
        return None

    def _launch(self, batch: ScheduledBatch, launch: Callable[[ScheduledBatch], LaunchedStep]) -> _PendingStep:
        running = launch(batch)
        self._scheduler.recover()
        return _PendingStep(batch, self._advance(batch), running)


def _host_needs_group(sequence: Sequence) -> bool:
    """Whether the host must know its group before the next one can be chosen."""
    return sequence.matcher is not None or sequence.adjusts_logits
