"""Emission: what a macro-step makes of the trunk's states; and the rules of whether a group, or a draft, goes on."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, StepOutput


class Emission(Protocol):
    """Makes the groups of a batch's M emitting rows."""

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether it can make this batch's groups."""

    def emit(self, states: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        """states [M, D] and features [M, D] each, of the emitting rows -> the groups."""


class GoOn:
    """Whether groups go on, for the M rows of a batch: arXiv 2505.20438, section 3.2, with our ends.

    A group goes on after a token while 1 - sigmoid(stop) >= confidence, which is -stop >= logit(confidence), computed
    in float32; never at confidence 1, nor beyond a row's limit, nor after an end token. A stop value is read before
    its token is chosen: where sampling, a penalty or a mask moved the choice off the argmax it is stale, and the group
    ends.
    kernels/graft/decide.h holds the same rule for the CPU's one call; a test compares the two.
    """

    def __init__(self, confidence: Tensor, group_limits: Tensor, end_ids: Tensor) -> None:
        """confidence: float32 [M]. group_limits: int64 [M]. end_ids: int64 [M, E], padded with -1."""
        self.limits = torch.where(confidence < 1, group_limits, 1)
        self.thresholds = torch.logit(confidence)
        self._end_ids = end_ids

    def after(self, index: int, tokens: Tensor, likeliest: Tensor, stop: Tensor, rows: Tensor | None = None) -> Tensor:
        """bool [R]: rows int64 [R] (None: all) go on after token `index`, of which `likeliest` says whether each was
        the argmax, with stop logits float32 [R]."""
        limits, thresholds, ends = self.limits, self.thresholds, self._end_ids
        if rows is not None:
            limits, thresholds, ends = limits[rows], thresholds[rows], ends[rows]
        ended = (tokens[:, None] == ends).any(-1)
        return (-stop >= thresholds) & likeliest & ~ended & (limits > index + 1)


def drafts_go_on(stop_probs: Tensor, index: int, confidence: Tensor, group_limits: Tensor) -> Tensor:
    """bool [R]: rows of verified groups draft another token after token `index`: while the chance that all their drafts
    are accepted is at least their confidence, within their limits; never at confidence 1.

    stop_probs: float32 [R, G], of tokens 0 to index at least. confidence: float32 [R]. group_limits: int64 [R].
    """
    chance = (1 - stop_probs[:, : index + 1]).prod(-1)
    return (chance >= confidence) & (confidence < 1) & (group_limits > index + 1)


def last_confirmed(tokens: Tensor, checks: Tensor) -> Tensor:
    """bool [M]: the rows of verified groups that end what the trunk confirms of their sequence.

    tokens: int64 [M], what the trunk chose. checks: of the batch. A row counts if every draft before it was the
    trunk's choice; the last that counts is one whose next draft was not, or that has none.
    """
    counts, last = True, []
    for token, check in zip(tokens.tolist(), checks.tolist(), strict=True):
        is_confirmed = token == check
        last.append(counts and not is_confirmed)
        counts = check < 0 or (counts and is_confirmed)
    return torch.tensor(last, dtype=torch.bool, device=tokens.device)
