"""The losses of many tokens over a large vocabulary: cross-entropy and distillation, with their gradient.

Logits are the largest tensors of a step. `token_losses` makes them in chunks of rows, and each chunk's gradient at once
while they are there: nothing of [rows, vocabulary] is kept for the backward pass, nor made a second time in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_LOGITS_A_CHUNK = 64 * 49152  # 12 MiB in float32: they stay in a CPU's cache


@dataclass(frozen=True, slots=True, eq=False)
class TokenTargets:
    """What R rows should give, as places in a head of L ids.

    target: int64 [R], the data's token, -1 where the head lacks it. weight: float32 [R] of its cross-entropy.
    places: int64 [R, k], the teacher's likeliest, -1 where the head lacks them. share: float32 [R, k], the weight of
    each one's cross-entropy. constant: float32 [R], what is added to a row's loss. Both have k = 0 without a teacher.
    """

    target: Tensor
    weight: Tensor
    places: Tensor
    share: Tensor
    constant: Tensor

    def rows(self, rows: slice) -> TokenTargets:
        return TokenTargets(
            self.target[rows], self.weight[rows], self.places[rows], self.share[rows], self.constant[rows]
        )


def token_targets(
    target: Tensor, teacher: tuple[Tensor, Tensor] | None, *, cross_entropy: float, distillation: float
) -> TokenTargets:
    """target int64 [R] and the teacher's likeliest, int64 [R, k] with log-probabilities [R, k]; places, -1: not there.

    The row's loss is `cross_entropy` times that with the target, none if it is not there, plus `distillation` times the
    KL divergence from the teacher's ids, renormalised over those that are there, to the model; that is weighted by how
    much of the teacher's probability they hold.
    """
    weight = cross_entropy * (target >= 0).float()
    if teacher is None or not distillation:
        none = target.new_zeros(len(target), 0)
        return TokenTargets(target, weight, none, none.float(), torch.zeros_like(weight))
    places, base = teacher
    given = base.float().masked_fill(places < 0, float("-inf")).exp()
    mass = given.sum(-1, keepdim=True)
    likely = given / mass.clamp(min=1e-9)
    share = distillation * likely * mass / base.float().exp().sum(-1, keepdim=True).clamp(min=1e-9)
    constant = (share * likely.clamp(min=1e-30).log()).sum(-1)
    return TokenTargets(target, weight, places, share, constant)


def token_losses(states: Tensor, head: Tensor, aims: TokenTargets) -> tuple[Tensor, Tensor]:
    """The sum of the rows' losses, float32 [], and each row's likeliest place, int64 [R].

    states: [R, D]; head: [L, D], whose dtype is that of the logits' matrix products.
    """
    loss, likeliest = _TokenLosses.apply(states, head, aims)  # type: ignore[no-untyped-call]
    return loss, likeliest


def _at(values: Tensor, places: Tensor) -> Tensor:
    return values.gather(-1, places.clamp(min=0))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, aims: TokenTargets) -> tuple[Tensor, Tensor]:
        of_states, of_head = ctx.needs_input_grad[:2]
        grad_states = torch.empty_like(states) if of_states else None
        grad_head = torch.zeros_like(head, dtype=torch.float32) if of_head else None
        loss = torch.zeros((), device=states.device)
        likeliest = torch.empty(len(states), dtype=torch.int64, device=states.device)
        size = max(1, _LOGITS_A_CHUNK // len(head))
        for start in range(0, len(states), size):
            rows = slice(start, start + size)
            x, aim = states[rows].to(head.dtype), aims.rows(rows)
            logits = F.linear(x, head).float()
            peak, likeliest[rows] = logits.max(-1)
            probs = logits.softmax(-1)
            total = peak - _at(probs, likeliest[rows, None])[:, 0].log()  # log of the sum of exponentials
            picked = (aim.weight * (_at(logits, aim.target[:, None])[:, 0] - total)).sum()
            rivals = (aim.share * (_at(logits, aim.places) - total[:, None])).sum()
            loss += aim.constant.sum() - picked - rivals
            if grad_states is None and grad_head is None:
                continue
            probs *= (aim.weight + aim.share.sum(-1))[:, None]
            probs.scatter_add_(-1, aim.target.clamp(min=0)[:, None], -aim.weight[:, None])
            probs.scatter_add_(-1, aim.places.clamp(min=0), -aim.share)
            grad = probs.to(head.dtype)
            if grad_states is not None:
                grad_states[rows] = (grad @ head).to(states.dtype)
            if grad_head is not None:
                grad_head += grad.T @ x
        ctx.save_for_backward(grad_states, None if grad_head is None else grad_head.to(head.dtype))
        ctx.mark_non_differentiable(likeliest)
        return loss, likeliest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_states, of_head = (None if g is None else g * grad_loss.to(g.dtype) for g in ctx.saved_tensors)
        return of_states, of_head, None
