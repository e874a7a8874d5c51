"""SamplingRows: how each emitting row of a step chooses its tokens, as the model takes it."""

from __future__ import annotations

from dataclasses import replace

import torch

from hamburger.engine.device.constraint import GrammarConstraint
from hamburger.engine.device.running_step import EmittingRow
from hamburger.engine.device.staged import Staged
from hamburger.model.batch import Adjustments, SamplingBatch, empty_sampling


class SamplingRows:
    """is_verified: whether groups are. vocab_size: of the trunk."""

    def __init__(self, device: torch.device, vocab_size: int, *, is_verified: bool) -> None:
        self._device, self._vocab_size, self._is_verified = device, vocab_size, is_verified
        self._greedy: dict[int, SamplingBatch] = {}

    def batch(self, rows: list[EmittingRow], constraint: GrammarConstraint | None, staged: Staged) -> SamplingBatch:
        """Of a step's emitting rows; staged: takes the numbers."""
        params = [row.sequence.params for row in rows]
        greedy = self._greedy.get(len(rows))
        if greedy is None:  # what greedy rows without log-probabilities all have: made once for each number of them
            greedy = self._greedy[len(rows)] = replace(empty_sampling(len(rows), self._device), any_filtered=False)
        adjustments = _adjustments(rows, staged)
        is_alike = (
            constraint is None and adjustments is None and all(p.is_greedy and p.logprobs is None for p in params)
        )
        if is_alike and self._is_verified:  # no end token ends a run of drafts, and no noise depends on its place
            return greedy
        batch = replace(
            greedy,
            output_index=staged.ints([row.sequence.num_output_tokens + len(row.drafts) for row in rows]),
            end_ids=staged.padded([row.sequence.sorted_end_ids for row in rows], -1),
            adjustments=adjustments,
            constraint=constraint,
        )
        if any(not p.is_greedy for p in params):
            batch = replace(
                batch,
                temperature=staged.floats([p.temperature for p in params]),
                top_k=staged.ints([p.top_k for p in params]),
                top_p=staged.floats([p.top_p for p in params]),
                min_p=staged.floats([p.min_p for p in params]),
                seed=staged.ints([p.seed or 0 for p in params]),
                any_sampled=True,
                any_filtered=any(not p.is_greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params),
            )
        if any(p.logprobs is not None for p in params):
            logprobs = [-1 if p.logprobs is None else p.logprobs for p in params]
            most = min(max(logprobs), self._vocab_size)
            batch = replace(batch, logprobs=staged.ints(logprobs), max_logprobs=most)
        return batch


def _adjustments(emitting: list[EmittingRow], staged: Staged) -> Adjustments | None:
    """The rows that ask for penalties, bias or min_tokens; None when no row does."""
    rows = [i for i, row in enumerate(emitting) if row.sequence.adjusts_logits]
    if not rows:
        return None
    chosen = [emitting[i].sequence for i in rows]
    params = [sequence.params for sequence in chosen]
    bias = [(i, token_id, value) for i, p in enumerate(params) for token_id, value in p.logit_bias.items()]
    return Adjustments(
        row=staged.ints(rows),
        # Only repetition_penalty looks at the prompt.
        prompt_ids=staged.padded([s.prompt_ids if s.params.repetition_penalty != 1 else [] for s in chosen], -1),
        output_ids=staged.padded([_history(emitting[i]) for i in rows], -1),
        presence=staged.floats([p.presence_penalty for p in params]),
        frequency=staged.floats([p.frequency_penalty for p in params]),
        repetition=staged.floats([p.repetition_penalty for p in params]),
        bias_row=staged.ints([i for i, _, _ in bias]),
        bias_id=staged.ints([token_id for _, token_id, _ in bias]),
        bias=staged.floats([value for _, _, value in bias]),
        min_index=staged.ints([p.min_tokens for p in params]),
        any_penalties=any(p.has_penalties for p in params),
    )


def _history(row: EmittingRow) -> list[int]:
    """What its penalties, if it has any, look at of the answer."""
    return [*row.sequence.output_ids, *row.drafts] if row.sequence.params.has_penalties else []
