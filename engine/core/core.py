"""EngineCore.step(): schedule, run, accept. It decides; it does no IO, knows no text, and its clock is handed in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import chain
from typing import Literal

from hamburger.engine.core.accepting import Accepting
from hamburger.engine.core.batch import BatchResult, Runner, ScheduledBatch, Settle
from hamburger.engine.core.draft_outcomes import DraftOutcomes
from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.core.matchers import Matchers
from hamburger.engine.core.scheduler import Scheduler
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.errors import InvalidRequest, OutOfMemory
from hamburger.engine.types.messages import (
    AbortRequest,
    CheckedDrafts,
    LoadLora,
    RequestFailed,
    StepOutputs,
    StepStats,
    SubmitRequest,
    UnloadLora,
)

logger = logging.getLogger(__name__)


class EngineCore:
    """`clock` gives time.monotonic() seconds. Not thread-safe: one thread owns a core."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        policy: DraftPolicy | None = None,
        settle: Settle | None = None,
        loras: CoreLoras | None = None,
    ) -> None:
        """loras: None where requests name none. grammars: for requests that have one; without it they fail.

        policy: of the drafts of verified groups; None makes none. settle: wanted where the config's answers settle.
        """
        self.config = config
        self.grammars = grammars
        self._matchers = Matchers(grammars)
        self._refused: list[RequestFailed] = []
        self._settled_tokens = self._dropped_slots = 0  # of the step in progress
        self._runner = runner
        self._clock = clock
        self._policy = policy
        self._drafts = DraftOutcomes(policy)
        self._settle_chunk = settle
        self._loras = loras
        self._scheduler = Scheduler(config, policy)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._refused)

    def add(self, request: SubmitRequest) -> None:
        """Queue a request that was validated (engine/request.py)."""
        of = self.config
        if request.lora and (self._loras is None or not self._loras.has(request.lora)):
            message = "The LoRA adapter was unloaded before the request came to run."
            self._refused.append(RequestFailed(request.request_id, "lora", message))
            return
        sequence = Sequence(request, of.eos_token_ids, of.max_model_len, of.groups, of.settling)
        try:
            sequence.matcher = self._matchers.begin(request.params)
        except InvalidRequest as error:
            self._refused.append(RequestFailed(request.request_id, "grammar", str(error)))
            return
        self._scheduler.add(sequence)

    def abort(self, request: AbortRequest) -> None:
        """Free a request's blocks at once. Unknown ids are ignored."""
        self._scheduler.remove(request.request_id)

    def load_lora(self, request: LoadLora) -> str | None:
        """Read an adapter at once. Returns why it was not loaded; None: requests may name it."""
        if (error := self.begin_lora(request)) is None:
            error = self.read_lora(request)
            self.end_lora(request.number, error)
        return error

    def begin_lora(self, request: LoadLora) -> str | None:
        """These three are load_lora in parts (CoreLoras): read_lora may run in another thread, beside steps."""
        if self._loras is None:
            return "No LoRA adapters are served: max_loras is 0."
        self._drop_loras()  # whose last requests were aborted since the last step
        return self._loras.begin(request)

    def read_lora(self, request: LoadLora) -> str | None:
        return None if self._loras is None else self._loras.read(request)

    def end_lora(self, number: int, error: str | None) -> None:
        if self._loras is not None:
            self._loras.end(number, error)
            self._drop_loras()  # it may have been unloaded meanwhile

    def unload_lora(self, request: UnloadLora) -> None:
        """Forget an adapter as soon as no request uses it."""
        if self._loras is not None:
            self._loras.unload(request)
            self._drop_loras()

    def _drop_loras(self) -> None:
        if self._loras is not None:
            self._loras.drop_unused(chain(self._scheduler.running, self._scheduler.waiting))

    def reset(self) -> None:
        """Forget every request and free all blocks, whatever state an interrupted step left behind."""
        self._scheduler = Scheduler(self.config, self._policy)
        self._refused = []

    def fail_all(self, kind: Literal["engine_dead", "draining"], message: str) -> StepOutputs:
        """Give every unfinished request up."""
        failures = [RequestFailed(request_id, kind, message) for request_id in self._scheduler.request_ids()]
        for failure in failures:
            self.abort(AbortRequest(failure.request_id))
        failures, self._refused = [*self._refused, *failures], []
        self._settled_tokens = self._dropped_slots = 0  # those of the last step were told
        return StepOutputs(failures=failures, stats=self._stats(ScheduledBatch([]), 0, [], 0.0, []))

    def step(self) -> StepOutputs:
        """One macro-step of everything that is scheduled. With nothing to schedule it only reports the state."""
        start = self._clock()
        failures = self._expire(start)
        self._settle(failures)
        batch, result = self._run(self._scheduler.schedule(start), failures)
        return self._accept(batch, self._advance(batch), result, failures, start)

    def _expire(self, now: float) -> list[RequestFailed]:
        """The requests that end before they run."""
        failures, self._refused = self._refused, []
        return failures + [self._timeout(sequence, now) for sequence in self._scheduler.expire(now)]

    def _settle(self, failures: list[RequestFailed]) -> None:
        """Old tokens of running answers give their slots back before anything else is computed. An answer whose tokens
        memory does not let settle fails: nobody knows what is in its slots then."""
        self._settled_tokens = self._dropped_slots = 0
        while due := [sequence for sequence in self._scheduler.running if sequence.settles]:
            if self._settle_chunk is None:
                raise RuntimeError("answers settle, but nothing moves their slots.")
            for sequence in due:
                chunk, dropped = self._scheduler.blocks.settle(sequence), sequence.num_dropped
                is_new = sequence.settle()
                try:
                    self._settle_chunk(chunk)
                except OutOfMemory as error:
                    self._give_up(sequence, error, failures)
                    continue
                self._scheduler.confirm(sequence)
                if is_new:  # not again, by a replay
                    self._settled_tokens += len(chunk.candidates)
                    self._dropped_slots += sequence.num_dropped - dropped

    def _advance(self, batch: ScheduledBatch) -> list[int]:
        """The batch's slots will be in the pool before any step that is launched from here on. Returns how many slots
        each of its sequences has there."""
        for item in batch.sequences:
            item.sequence.num_computed_slots += item.num_slots
        return [item.sequence.num_computed_slots for item in batch.sequences]

    def _accept(
        self, batch: ScheduledBatch, ends: list[int], result: BatchResult, failures: list[RequestFailed], start: float
    ) -> StepOutputs:
        """Give each sequence its group, and end those that are finished. ends: what _advance returned for the batch."""
        # Its newest group's slot is new work, all others are prefill.
        new_work = sum(
            item.emits and end > len(item.sequence.prompt_ids) for item, end in zip(batch.sequences, ends, strict=True)
        )
        num_prompt_slots = batch.num_slots - new_work
        accepting = Accepting(self._scheduler, self._matchers, self._drafts)
        outputs = accepting.take(batch, ends, result, failures)
        self._drop_loras()
        seconds = self._clock() - start
        if num_prompt_slots == 0:
            self._drafts.timed(batch, seconds)
        group_sizes = [len(output.token_ids) for output in outputs if output.token_ids]
        checked = [output.drafts for output in outputs if output.drafts is not None]
        return StepOutputs(outputs, failures, self._stats(batch, num_prompt_slots, group_sizes, seconds, checked))

    def _run(self, batch: ScheduledBatch, failures: list[RequestFailed]) -> tuple[ScheduledBatch, BatchResult]:
        """What was computed of the batch: all, or, where the memory did not hold it, nothing.

        The next steps are smaller then, until one fits. A request whose single slot does not is added to `failures`.
        """
        if not batch.sequences:
            return batch, BatchResult([])
        try:
            result = self._runner.run(batch)
        except OutOfMemory as error:
            return self._shrink(batch, error, failures), BatchResult([])
        self._scheduler.recover()
        return batch, result

    def _shrink(self, batch: ScheduledBatch, error: OutOfMemory, failures: list[RequestFailed]) -> ScheduledBatch:
        """What is left of a batch that memory does not hold: no slots, and whom it preempts."""
        logger.warning("A step of %d slots ran out of memory: %s", batch.num_rows, error)
        preempted = list(batch.preempted)
        if batch.num_rows > 1:
            preempted += self._scheduler.shrink(batch)
        else:
            self._give_up(batch.sequences[0].sequence, error, failures)
        return ScheduledBatch([], preempted, batch.cache_queries, batch.cache_hits)

    def _give_up(self, sequence: Sequence, error: OutOfMemory, failures: list[RequestFailed]) -> None:
        message = f"Memory does not hold a step of this request alone: {error}"
        failures.append(RequestFailed(sequence.request_id, "out_of_memory", message))
        self.abort(AbortRequest(sequence.request_id))

    def check_integrity(self) -> None:
        """Raise RuntimeError when blocks leaked or a sequence is in the wrong place."""
        self._scheduler.check_integrity()

    def _timeout(self, sequence: Sequence, now: float) -> RequestFailed:
        waited, limit = now - sequence.arrival_time, self.config.max_queue_seconds
        message = f"The request waited {waited:.1f} s in the queue, longer than the {limit:g} s allowed."
        return RequestFailed(sequence.request_id, "queue_timeout", message)

    def _stats(
        self,
        batch: ScheduledBatch,
        num_prompt_slots: int,
        group_sizes: list[int],
        seconds: float,
        drafts: list[CheckedDrafts],
    ) -> StepStats:
        return StepStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_preemptions=len(batch.preempted),
            used_slots=self._scheduler.blocks.used_slots,
            total_slots=self.config.total_slots,
            prompt_slots=num_prompt_slots,
            decoded_sequences=len(group_sizes),
            group_sizes=group_sizes,
            seconds=seconds,
            cache_queries=batch.cache_queries,
            cache_hits=batch.cache_hits,
            generated_slots=sum(group_sizes) if self.config.groups == "verified" else len(group_sizes),
            drafts=drafts,
            settled_tokens=self._settled_tokens,
            dropped_slots=self._dropped_slots,
        )
