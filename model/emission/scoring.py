"""Log-probabilities of prompts: the states that a step reads for them beside those of its groups, and the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from hamburger.model.backend import Backend
from hamburger.model.batch import ForwardBatch, Logprobs, Reads, ScoredSlots
from hamburger.model.sampler import LogprobsOf, token_logprobs

# Logits of a long prompt are never held at once: float32 rows of a 128k vocabulary take 64 MiB this way.
SCORED_ROWS_AT_ONCE = 128


def reads_of(batch: ForwardBatch) -> Reads:
    """One state of each emitting slot, with its features; then those of `batch.scored`."""
    rows = batch.emit if batch.scored is None else torch.cat((batch.emit, batch.scored.rows))
    return Reads(rows, len(batch.emit))


def score(backend: Backend, states: Tensor, scored: ScoredSlots, logprobs_of: LogprobsOf = token_logprobs) -> Logprobs:
    """Log-probabilities of the tokens after `states` [S, D], under the trunk alone."""
    parts = [
        logprobs_of(backend.head(rows), ids, scored.max_logprobs, ranked=True)
        for rows, ids in zip(states.split(SCORED_ROWS_AT_ONCE), scored.next_ids.split(SCORED_ROWS_AT_ONCE), strict=True)
    ]
    fields = ((part.chosen, part.top_ids, part.top, part.ranks) for part in parts)
    return Logprobs(*(torch.cat(field) for field in zip(*fields, strict=True)))
