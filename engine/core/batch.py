"""ScheduledBatch and BatchResult: the scheduler's contract with the runner. Plain Python, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hamburger.engine.core.sequence import Sequence
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.types.messages import TokenLogprobs


class ScheduledSequence(NamedTuple):
    """Compute the slots [num_computed_slots, num_computed_slots + num_slots) of a sequence; its blocks cover them.

    emits: the last of them is the sequence's last slot and it may have more tokens, so the macro-step emits a group.
    drafts: of verified groups, tokens that are computed in the slots behind those, and kept as far as the trunk chooses
        them; its blocks cover them too. None where there are none, else at least one.
    max_drafts: how many the micro-steps may draft for its next macro-step, while the chance that all of them are
        accepted is at least min_chance.
    """

    sequence: Sequence
    num_slots: int
    emits: bool
    drafts: Proposal | None = None
    max_drafts: int = 0
    min_chance: float = 0.0

    @property
    def num_rows(self) -> int:
        """Slots that the step computes."""
        return self.num_slots + (len(self.drafts.token_ids) if self.drafts else 0)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work: first the sequences that bring exactly one slot, then those that bring several.

    preempted: sequences that lost their blocks in this step; they wait again and are not in `sequences`.
    cache_queries, cache_hits: slots of sequences that (re)entered the pool in this step, and those found there.
    """

    sequences: list[ScheduledSequence]
    preempted: list[Sequence] = field(default_factory=list)
    cache_queries: int = 0
    cache_hits: int = 0

    @property
    def num_slots(self) -> int:
        """Without drafts."""
        return sum(item.num_slots for item in self.sequences)

    @property
    def num_rows(self) -> int:
        """Slots that the step computes, drafts among them."""
        return sum(item.num_rows for item in self.sequences)


@dataclass(frozen=True, slots=True)
class SettlingChunk:
    """Tokens of a sequence that settle together, by their slots in the pool.

    candidates: where each of them is, and positions: its token's. kept_at: where those go that stay, in order. moves:
    (from, to) of slots around them.
    """

    candidates: list[int]
    positions: list[int]
    kept_at: list[int]
    moves: list[tuple[int, int]]


class GroupResult(NamedTuple):
    """One emitted group, untrimmed: 1 to max_group tokens, with one entry a token in each list.

    stop_probs[i] = sigmoid(stop logit) after token i. logprobs: None unless the request asks for them.
    proposal: drafts for the next macro-step, of verified groups.
    """

    token_ids: list[int]
    stop_probs: list[float]
    logprobs: list[TokenLogprobs] | None = None
    proposal: Proposal | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch gave: one group for each sequence that emits, in the batch's order.

    prompt_logprobs: request id -> entries of the prompt tokens in Sequence.unscored, in order, where there are any.
    """

    groups: list[GroupResult]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


class Runner(Protocol):
    """What computes a batch. It reads sequences, never changes them, and keeps nothing about them between steps."""

    def run(self, batch: ScheduledBatch) -> BatchResult:
        """Compute the batch's slots, and score the prompt tokens that Sequence.unscored names.

        Raises OutOfMemory, and has done nothing then that could not be done again.
        """


class LaunchedStep(Protocol):
    """A batch that the device works on, or has in its queue: what it is computed from was taken over already."""

    def result(self) -> BatchResult:
        """Wait for it."""

    def then(self, batch: ScheduledBatch) -> LaunchedStep:
        """Launch another batch behind it. A sequence that awaits its group of this step brings that group's slot."""


# Chooses which of a chunk's tokens stay, and moves what is in the slots; raises OutOfMemory.
Settle = Callable[[SettlingChunk], None]
