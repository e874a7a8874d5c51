"""ForwardBatch and StepOutput: the model's whole contract with the engine. Tensors only, no requests.

A batch holds the new slots of some sequences, one sequence after the other: first those that bring exactly one slot
(`num_single`, mostly decoding ones), then those that bring several (prefill chunks, replays).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """Changes to the logits of the A rows that ask for any, before temperature.

    row: int64 [A], ascending, into the batch's emitting rows.
    prompt_ids, output_ids: int64 [A, *], right-padded with -1: tokens that the penalties look at.
    presence, frequency, repetition: float32 [A] (0, 0 and 1 change nothing).
    bias_row, bias_id: int64 [N] and bias: float32 [N]: `bias` is added to logit `bias_id` of the row that
        `row[bias_row]` names.
    min_index: int64 [A]: the row's end tokens are forbidden while the output token index is below it.
    any_penalties: whether any of the penalties changes anything.
    """

    row: Tensor
    prompt_ids: Tensor
    output_ids: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    bias_row: Tensor
    bias_id: Tensor
    bias: Tensor
    min_index: Tensor
    any_penalties: bool


class Constraint(Protocol):
    """What some emitting rows may choose at all; it follows their groups while the model makes them.

    rows: int64 [C], ascending, into the batch's emitting rows.
    """

    rows: Tensor

    def allowed(self, rows: Tensor) -> Tensor:
        """int32 [R, ceil(V / 32)]: a bit for each token, set where it may come next in rows int64 [R], all of them
        constrained. Some always is, but a micro-step's short list may hold none of them."""

    def advance(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Rows int64 [R], constrained or not, have chosen tokens [R]. bool [R]: nothing may follow."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How each of the M emitting rows chooses its tokens.

    temperature, top_p, min_p: float32 [M]; temperature 0 is greedy. top_k: int64 [M], 0 means off.
    seed: int64 [M]; output_index: int64 [M], the index in the answer of the group's first token. Noise is keyed by
        (seed, output token index, token) alone.
    end_ids: int64 [M, E], padded with -1: a group ends with the first of these.
    logprobs: int64 [M], how many rivals' log-probabilities are asked; -1 for none at all.
    any_sampled: whether any row has a temperature above 0 (known to the host, so that no device sync is needed).
    any_filtered: whether a row with a temperature above 0 may have a top_k, top_p or min_p that filters.
    max_logprobs: the largest entry of `logprobs`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    output_index: Tensor
    end_ids: Tensor
    logprobs: Tensor
    any_sampled: bool
    max_logprobs: int
    adjustments: Adjustments | None
    constraint: Constraint | None = None
    any_filtered: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSlots:
    """The S prompt slots whose next prompt token is scored: how likely the trunk finds it.

    rows: int64 [S], index in T of each slot. next_ids: int64 [S], the token after it.
    max_logprobs: how many rivals' log-probabilities are asked at most.
    """

    rows: Tensor
    next_ids: Tensor
    max_logprobs: int


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """The slots of a batch whose states something wants.

    rows: int64 [N], index in T of each; a slot may come twice. num_featured: the graft's features of the first M of
        them are wanted too.
    """

    rows: Tensor
    num_featured: int


@dataclass(frozen=True, slots=True, eq=False)
class LoraSlots:
    """The N slots of a batch that pass one LoRA adapter. number: the adapter's. rows: int64 [N], ascending, in T."""

    number: int
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """T new slots of B sequences, of which M emit a group.

    token_ids: int64 [T, W], the tokens of each slot, right-padded with 0; W is the widest group here.
    group_sizes: int64 [T], tokens of each slot (1 for a prompt token). max_group_size: their maximum (= W).
    positions: int64 [T], rotary position: the index of the slot's last token in its sequence.
    text_lengths: int64 [T], for `dynamic` rope scaling: the prompt's tokens for a prompt slot, position + 1 for a
        group; None for a trunk without it.
    write_slots: int64 [T], where each slot's KV goes: block id * block_size + offset.
    block_tables: int64 [B, N], each sequence's block ids, right-padded with 0.
    context_slots: int64 [B], slots a sequence has in the cache, the new ones included.
    query_slots: B ints, new slots of each sequence; the first `num_single` are 1.
    context_slots_host: B ints, the values of context_slots on the host; None where only the device knows them, of a
        batch of one-slot rows whose tensors stay where they are (CUDA graphs).
    settled_from, settled_slots: int64 [B], where a sequence's settled slots begin and how many they are; None where no
        places in them are lent (SettledPlaces), or no sequence has any.
    emit: int64 [M], index in T of the last slot of each emitting sequence.
    confidence: float32 [M]. group_limits: int64 [M], most tokens the row may emit now (>= 1).
    max_group_limit: the maximum of group_limits over rows with a confidence below 1, else 1. max_free_limit: the same
        over rows without a grammar; None where that is no other.
    scored: prompt slots whose next token is scored; None, and no work for it, where no request asks.
    checks: of verified groups (docs/architecture.md), int64 [M]: the token that the next row was fed, a draft, where
        that row follows this one in its sequence; -1 where none does. Each draft is a row of its own then, with one
        slot, and what a row emits beyond its first token are drafts for its next macro-step: likeliest tokens, as many
        as group_limits and confidence allow. None of composed groups, whose tokens are all emitted.
    loras: which slots pass which LoRA adapters, each at most one; the others are the base's.
    """

    token_ids: Tensor
    group_sizes: Tensor
    max_group_size: int
    positions: Tensor
    write_slots: Tensor
    block_tables: Tensor
    context_slots: Tensor
    query_slots: list[int]
    context_slots_host: list[int] | None
    num_single: int
    emit: Tensor
    confidence: Tensor
    group_limits: Tensor
    max_group_limit: int
    sampling: SamplingBatch
    scored: ScoredSlots | None = None
    text_lengths: Tensor | None = None
    max_free_limit: int | None = None
    checks: Tensor | None = None
    settled_from: Tensor | None = None
    settled_slots: Tensor | None = None
    loras: tuple[LoraSlots, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log-probabilities (nats, float32) of the model's own distribution, for each emitted or each scored token.

    chosen: [M, G] or [S]. top_ids: int64 and top: [M, G, K] or [S, K], likeliest first; K = max_logprobs.
    ranks: int64 [S], of scored tokens: 1 + how many are likelier.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor
    ranks: Tensor | None = None

    def first(self, rows: int) -> Logprobs:
        """Those of the first rows."""
        return Logprobs(self.chosen[:rows], self.top_ids[:rows], self.top[:rows])


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The M groups that a macro-step emitted; G is the widest possible group of the step.

    token_ids: int64 [M, G], right-padded with 0. group_sizes: int64 [M].
    stop_probs: float32 [M, G], sigmoid(stop logit) after each token; 1.0 everywhere for a plain base.
    With `checks`, the first token of a row is what the trunk chooses there, the others are drafts of what follows it,
    of rows whose draft was refused or that had none: nobody reads those of others. stop_probs are 1 - the chance that
    a draft is accepted if those before it are: the micro-step's own probability of it. 0 for the trunk's choices.
    Drafts have no log-probabilities.
    prompt_logprobs: of the S prompt tokens that the batch has scored; None where it has none.
    """

    token_ids: Tensor
    group_sizes: Tensor
    stop_probs: Tensor
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None = None


def stop_probability(stop: Tensor) -> Tensor:
    """sigmoid(stop logit), float32 of any shape, the same bits wherever in a batch a row lies.

    torch's own rounds a tensor's last elements otherwise than those before, where the processor has no AVX-512.
    """
    return torch.reciprocal(1 + torch.exp(-stop))


def empty_sampling(rows: int, device: torch.device) -> SamplingBatch:
    """Greedy choice for `rows` rows without end tokens: what golden numbers and scoring use."""
    f = torch.zeros(rows, device=device)
    i = torch.zeros(rows, dtype=torch.int64, device=device)
    return SamplingBatch(
        temperature=f, top_k=i, top_p=f + 1, min_p=f, seed=i, output_index=i,
        end_ids=i.new_zeros(rows, 0), logprobs=i - 1, any_sampled=False, max_logprobs=-1, adjustments=None,
    )  # fmt: skip
