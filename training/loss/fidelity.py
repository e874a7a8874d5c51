"""What a merge keeps: how near the model's next token stays to the base's once the tokens before it share a slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.training.batches.batches import TrainBatch

# Of the merges that a text could have had and has not: the mean of those of the embedded default (docs/training.md).
UNSEEN = 0.6
_ROWS = 128


@torch.no_grad()
def merge_fidelity(hidden: Tensor, head: Tensor, batch: TrainBatch) -> Tensor:
    """float32 [M]: exp(-KL) of the base's likeliest ids from the model's, for the token after each row's next group.

    NaN where that group has one token, or nothing comes after it. hidden: [M, D], the trunk's normed states of the
    batch's rows; head: [V, D]. The batch needs the base's likeliest ids.
    """
    found = torch.full(batch.emit.shape, torch.nan, device=hidden.device)
    if batch.teacher_ids is None or batch.teacher_logprobs is None:
        return found
    followed = (batch.next_sizes[:-1] > 1) & (batch.emit[1:] == batch.emit[:-1] + 1)
    for rows in followed.nonzero().squeeze(-1).split(_ROWS):
        after = rows + 1
        own = F.linear(hidden[after].to(head.dtype), head).float().log_softmax(-1)
        base = batch.teacher_logprobs[after, 0]
        apart = base - own.gather(-1, batch.teacher_ids[after, 0])
        divergence = (base.exp() * apart).masked_fill(base == -torch.inf, 0).sum(-1)
        found[rows] = (-divergence.clamp(min=0)).exp()
    return found
