"""Discrete-event replay: the real EngineCore, scheduler, blocks and prefix cache in virtual time. No torch, no waiting.

Only two things are stand-ins: the runner, which emits groups of drawn or scripted sizes, lets old tokens settle where
the configuration says so, and moves the clock by what a CostModel says that this takes, and the clock.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Protocol

from hamburger.engine.core.batch import BatchResult, GroupResult, ScheduledBatch, SettlingChunk
from hamburger.engine.core.core import EngineCore
from hamburger.engine.dial.confidence_dial import ConfidenceDial, DialRow, DialStep
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.messages import StepStats, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from simulation.costs import CostModel, work_of
from simulation.traces import Trace, TraceRow

CHECK_EVERY = 500  # steps between two checks of the core's integrity
FIRST_OUTPUT_ID = 1 << 32  # simulated answers have tokens that no prompt has, other ones for each request


class GroupSizes(Protocol):
    def size(self, request_id: str, index: int) -> int:
        """Tokens of a request's next group, the index-th, before anything trims it."""


@dataclass(frozen=True, slots=True)
class DrawnSizes:
    """Each group's size is drawn on its own: shares[n - 1] is the probability of n tokens."""

    shares: tuple[float, ...]
    seed: int = 0

    @property
    def mean(self) -> float:
        return sum(n * share for n, share in enumerate(self.shares, start=1))

    def size(self, request_id: str, index: int) -> int:
        if len(self.shares) == 1:
            return 1
        bits = blake2b(f"{self.seed} {request_id} {index}".encode(), digest_size=7).digest()
        bounds = [*accumulate(self.shares)]
        return min(bisect(bounds, int.from_bytes(bits) / 2**56 * bounds[-1]), len(bounds) - 1) + 1


@dataclass(frozen=True, slots=True)
class ScriptedSizes:
    """The sizes that a real run had; groups that it did not have are of one token."""

    sizes: Mapping[str, Sequence[int]]

    def size(self, request_id: str, index: int) -> int:
        sizes = self.sizes[request_id]
        return sizes[index] if index < len(sizes) else 1


@dataclass(frozen=True, slots=True)
class Dialled:
    """Each request's confidence is what the dial has in force when the request arrives; its groups are drawn as they
    are at that confidence. by_confidence: one entry for each of the dial's levels."""

    dial: ConfidenceDial
    by_confidence: Mapping[float, DrawnSizes]
    chosen: dict[str, float] = field(default_factory=dict)

    def size(self, request_id: str, index: int) -> int:
        return self.by_confidence[self.chosen[request_id]].size(request_id, index)

    def submit(self, request_id: str, now: float) -> None:
        self.chosen[request_id] = self.dial.confidence(now)

    def observe(self, stats: StepStats, now: float, rows: Sequence[tuple[str, float | None, int]]) -> None:
        """rows: of each group its request, the seconds since that request's last group, its number of tokens."""
        told = [DialRow(self.chosen[request_id], gap, num_tokens) for request_id, gap, num_tokens in rows]
        num_tokens = sum(stats.group_sizes)
        self.dial.observe(DialStep(now, stats.seconds, stats.prompt_slots, stats.decoded_sequences, num_tokens, told))


def drawn_with_mean(mean: float, max_group: int, seed: int = 0) -> DrawnSizes:
    """Sizes 1 to max_group with this mean, each one a fixed factor as likely as the one before it.

    Raises ValueError where no such sizes have the mean.
    """
    if not 1 <= mean < max_group:
        raise ValueError(f"a mean of {mean} tokens a group: it must be in [1, {max_group}).")
    low, high = 0.0, 1e6
    for _ in range(200):
        factor = (low + high) / 2
        shares = _shares(factor, max_group)
        low, high = (factor, high) if DrawnSizes(shares).mean < mean else (low, factor)
    return DrawnSizes(_shares(high, max_group) if mean > 1 else (1.0,), seed)


def _shares(factor: float, max_group: int) -> tuple[float, ...]:
    weights = [factor**n for n in range(max_group)]
    return tuple(weight / sum(weights) for weight in weights)


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in seconds of the replay's clock.

    longest_gap: the longest time between two of its groups. passed_over: most steps in a row in which it decoded, had
    its blocks, and got no slot. computed_slots: that were ever in the pool, so that replays can be told apart.
    dropped_slots: that its settled tokens gave back.
    """

    row: TraceRow
    arrival: float
    scheduled: float = math.nan
    first_token: float = math.nan
    finished: float = math.nan
    tokens: int = 0
    group_sizes: list[int] = field(default_factory=list)
    cached_slots: int = 0
    preemptions: int = 0
    longest_gap: float = 0.0
    passed_over: int = 0
    last_group: float = math.nan
    last_step: int = -1
    computed_slots: int = 0
    dropped_slots: int = 0

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; nan for an answer of one token."""
        return (self.finished - self.first_token) / (self.tokens - 1) if self.tokens > 1 else math.nan


@dataclass(frozen=True, slots=True)
class Moment:
    """State after a step. answer_slots: of emitted groups, in the pool; used_slots: of all blocks that are held."""

    time: float
    used_slots: int
    answer_slots: int
    running: int
    waiting: int


@dataclass(slots=True)
class Replay:
    """busy_seconds: of all steps. prompt_slots: computed ones that were no newest group's, so prompts and replays;
    replayed_slots: computed ones that had been computed before."""

    outcomes: list[Outcome]
    moments: list[Moment] = field(default_factory=list)
    busy_seconds: float = 0.0
    preemptions: int = 0
    prompt_slots: int = 0
    replayed_slots: int = 0

    @property
    def seconds(self) -> float:
        return max(outcome.finished for outcome in self.outcomes) - min(outcome.arrival for outcome in self.outcomes)


class SimulatedRunner:
    """Emits groups of the given sizes, never more than a request may have, and moves the clock by the step's cost."""

    def __init__(self, costs: CostModel, sizes: GroupSizes, clock: VirtualClock) -> None:
        self._costs, self._sizes, self._clock = costs, sizes, clock
        self.replay = Replay([])
        self.outcomes: dict[str, Outcome] = {}
        self.answer_slots = 0
        self._step = 0

    def run(self, batch: ScheduledBatch) -> BatchResult:
        self._step += 1
        self.answer_slots = 0
        sizes = []
        for item in batch.sequences:
            sequence, outcome = item.sequence, self.outcomes[item.sequence.request_id]
            start, num_prompt = sequence.num_computed_slots, len(sequence.prompt_ids)
            # A decoding sequence brings its newest group's slot alone.
            is_decode = start >= num_prompt and start == sequence.num_slots - 1
            end = start + item.num_slots
            made = end + sequence.num_dropped  # those given back too
            self.replay.replayed_slots += max(0, min(made, outcome.computed_slots) - made + item.num_slots)
            outcome.computed_slots = max(outcome.computed_slots, made)
            self.answer_slots += max(0, end - num_prompt)
            if is_decode and outcome.last_step >= 0:
                outcome.passed_over = max(outcome.passed_over, self._step - outcome.last_step - 1)
            if item.emits:
                outcome.last_step = self._step
                size = self._sizes.size(sequence.request_id, len(sequence.groups))
                sizes.append((outcome, min(size, sequence.num_tokens_left)))
        for sequence in batch.preempted:
            outcome = self.outcomes[sequence.request_id]
            outcome.preemptions += 1
            outcome.last_step = -1
        self._pass(self._costs.seconds(work_of(batch, [size for _, size in sizes])))
        return BatchResult([_group(outcome, size) for outcome, size in sizes])

    def settle(self, chunk: SettlingChunk) -> None:
        self._pass(self._costs.settled_chunk)

    def _pass(self, seconds: float) -> None:
        self._clock.now += seconds
        self.replay.busy_seconds += seconds


def _group(outcome: Outcome, size: int) -> GroupResult:
    outcome.group_sizes.append(size)
    return GroupResult([FIRST_OUTPUT_ID + int(outcome.row.request_id)] * size, [0.0] * size)


def replay(trace: Trace, config: EngineConfig, costs: CostModel, sizes: GroupSizes) -> Replay:
    """Replay a whole trace. Raises RuntimeError when the core loses a request, a token or a block.

    With verified groups nothing is drafted: groups are of one token.
    """
    dialled = sizes if isinstance(sizes, Dialled) else None
    clock = VirtualClock()
    runner = SimulatedRunner(costs, sizes, clock)
    core = EngineCore(config, runner, clock, settle=runner.settle)
    pending = sorted(trace.rows, key=lambda row: row.arrival)
    result, num_added, num_steps = runner.replay, 0, 0
    while num_added < len(pending) or core.has_work:
        if not core.has_work:
            clock.now = max(clock.now, pending[num_added].arrival)
        while num_added < len(pending) and pending[num_added].arrival <= clock.now:
            row = pending[num_added]
            outcome = runner.outcomes[row.request_id] = Outcome(row, row.arrival)
            result.outcomes.append(outcome)
            if dialled is not None:
                dialled.submit(row.request_id, clock.now)
            core.add(_submission(trace, row))
            num_added += 1
        outputs = core.step()
        num_steps += 1
        if outputs.failures:
            raise RuntimeError(f"the core gave requests up: {outputs.failures}")
        rows: list[tuple[str, float | None, int]] = []
        for output in outputs.outputs:
            outcome = runner.outcomes[output.request_id]
            gap = clock.now - outcome.last_group if outcome.tokens else None
            rows.append((output.request_id, gap, len(output.token_ids)))
            if gap is None:
                outcome.scheduled, outcome.first_token = output.scheduled_time, clock.now
                outcome.cached_slots = output.cached_slots
            else:
                outcome.longest_gap = max(outcome.longest_gap, gap)
            outcome.tokens += len(output.token_ids)
            outcome.last_group, outcome.dropped_slots = clock.now, output.dropped_slots
            if output.finish_reason is not None:
                outcome.finished = clock.now
        if (stats := outputs.stats) is not None:
            result.preemptions += stats.num_preemptions
            result.prompt_slots += stats.prompt_slots
            state = stats.used_slots, runner.answer_slots, stats.num_running, stats.num_waiting
            result.moments.append(Moment(clock.now, *state))
            if dialled is not None:
                dialled.observe(stats, clock.now, rows)
        if num_steps % CHECK_EVERY == 0:
            core.check_integrity()
    core.check_integrity()
    for outcome in result.outcomes:
        if outcome.tokens != outcome.row.output_tokens or sum(outcome.group_sizes) != outcome.tokens:
            raise RuntimeError(f"request {outcome.row.request_id} had {outcome.tokens} tokens, not what it asked for.")
    return result


def _submission(trace: Trace, row: TraceRow) -> SubmitRequest:
    params = SamplingParams(temperature=0, max_tokens=row.output_tokens, ignore_eos=True, seed=0, confidence=0.5)
    return SubmitRequest(row.request_id, trace.prompt_ids(row), params, row.arrival)
