"""Log-probabilities of prompts: an Emission that also reads prompt slots, whose next token it scores."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hamburger.model.backend import Backend
from hamburger.model.batch import ForwardBatch, Logprobs, Reads, ScoredSlots, StepOutput
from hamburger.model.emission.emission import Emission
from hamburger.model.sampler import LogprobsOf, token_logprobs

# Logits of a long prompt are never held at once: float32 rows of a 128k vocabulary take 64 MiB this way.
SCORED_ROWS_AT_ONCE = 128


class ScoringEmission:
    """The groups that another emission makes, and the scores of `batch.scored` beside them."""

    def __init__(self, backend: Backend, groups: Emission, logprobs_of: LogprobsOf = token_logprobs) -> None:
        self._backend, self._groups, self._logprobs_of = backend, groups, logprobs_of

    def takes(self, batch: ForwardBatch) -> bool:
        return self._groups.takes(batch)

    def reads(self, batch: ForwardBatch) -> Reads:
        reads = self._groups.reads(batch)
        if batch.scored is None:
            return reads
        return Reads(torch.cat((reads.rows, batch.scored.rows)), reads.num_featured)

    def emit(self, states: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        if batch.scored is None:
            return self._groups.emit(states, features, batch)
        num_scored = len(batch.scored.rows)
        of_groups, of_scores = states.split((len(states) - num_scored, num_scored))
        output = self._groups.emit(of_groups, features, batch)
        return replace(output, prompt_logprobs=score(self._backend, of_scores, batch.scored, self._logprobs_of))


def score(backend: Backend, states: Tensor, scored: ScoredSlots, logprobs_of: LogprobsOf = token_logprobs) -> Logprobs:
    """Log-probabilities of the tokens after `states` [S, D], under the trunk alone."""
    parts = [
        logprobs_of(backend.head(rows), ids, scored.max_logprobs, ranked=True)
        for rows, ids in zip(states.split(SCORED_ROWS_AT_ONCE), scored.next_ids.split(SCORED_ROWS_AT_ONCE), strict=True)
    ]
    fields = ((part.chosen, part.top_ids, part.top, part.ranks) for part in parts)
    return Logprobs(*(torch.cat(field) for field in zip(*fields, strict=True)))
