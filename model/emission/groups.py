"""Collects the groups of one macro-step, token by token, from the rows that go on."""

from __future__ import annotations

import torch
from torch import Tensor

from hamburger.model.batch import Logprobs, StepOutput
from hamburger.model.sampler import LogprobsOf


class GrowingGroups:
    """The groups of one macro-step, of fewer rows with each token. static.py has the form of static shapes."""

    def __init__(self, rows: int, width: int, max_logprobs: int, device: torch.device, logprobs_of: LogprobsOf) -> None:
        self._logprobs_of = logprobs_of
        self.token_ids = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.stop_probs = torch.zeros(rows, width, device=device)
        self.sizes = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs: Logprobs | None = None
        if max_logprobs >= 0:
            top = torch.zeros(rows, width, max_logprobs, device=device)
            self.logprobs = Logprobs(torch.zeros(rows, width, device=device), top.long(), top)

    def add(
        self, rows: Tensor, index: int, tokens: Tensor, stop_probs: Tensor, logits: Tensor | None, asked: Tensor
    ) -> None:
        """Token `index` of rows [R]; log-probabilities only for the rows in `asked` (bool [R]).

        logits: [R, V]; None where no row asks."""
        self.token_ids[rows, index] = tokens
        self.stop_probs[rows, index] = stop_probs
        self.sizes[rows] = index + 1
        if self.logprobs is None or logits is None:
            return
        at = asked.nonzero().squeeze(-1)
        if len(at):
            found = self._logprobs_of(logits[at], tokens[at], self.logprobs.top.shape[-1])
            self.logprobs.chosen[rows[at], index] = found.chosen
            self.logprobs.top_ids[rows[at], index] = found.top_ids
            self.logprobs.top[rows[at], index] = found.top

    def output(self) -> StepOutput:
        return StepOutput(self.token_ids, self.sizes, self.stop_probs, self.logprobs)
