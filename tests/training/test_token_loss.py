"""Token losses with their gradient made in the forward pass, against autograd over all rows at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.training.loss import token_loss
from hamburger.training.loss.token_loss import TokenTargets, token_losses, token_targets

ROWS, WIDTH, IDS, K = 23, 16, 40, 6


def some_aims(generator: torch.Generator, *, teacher: bool = True, cross_entropy: float = 0.3) -> TokenTargets:
    """Targets and a teacher, a part of them not in the head."""
    target = torch.randint(-1, IDS, (ROWS,), generator=generator)
    places = torch.stack([torch.randperm(IDS + 8, generator=generator)[:K] for _ in range(ROWS)])
    logprobs = torch.randn(ROWS, K, generator=generator).log_softmax(-1) - 0.1
    logprobs[3, 2:] = float("-inf")  # as where the data holds fewer
    logprobs[4] = float("-inf")
    rivals = (torch.where(places < IDS, places, -1), logprobs) if teacher else None
    return token_targets(target, rivals, cross_entropy=cross_entropy, distillation=0.7)


def gradients(
    losses: object, states: Tensor, head: Tensor, aims: TokenTargets
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert callable(losses)
    states, head = states.clone().requires_grad_(), head.clone().requires_grad_()
    loss, likeliest = losses(states, head, aims)
    (3 * loss).backward()
    assert states.grad is not None
    assert head.grad is not None
    return loss.detach(), likeliest, states.grad, head.grad


def plain_token_losses(states: Tensor, head: Tensor, aims: TokenTargets) -> tuple[Tensor, Tensor]:
    """`token_losses` by autograd, all rows at once."""
    logprobs = F.linear(states.to(head.dtype), head).float().log_softmax(-1)
    loss = aims.constant.sum() - (aims.weight * logprobs.gather(-1, aims.target.clamp(min=0)[:, None])[:, 0]).sum()
    loss = loss - (aims.share * logprobs.gather(-1, aims.places.clamp(min=0))).sum()
    return loss, logprobs.detach().argmax(-1)


@pytest.mark.parametrize("chunk", [1, 5 * IDS, 10_000])
@pytest.mark.parametrize("teacher", [True, False])
def test_losses_and_gradients_are_autograds(monkeypatch: pytest.MonkeyPatch, chunk: int, teacher: bool) -> None:
    monkeypatch.setattr(token_loss, "_LOGITS_A_CHUNK", chunk)
    g = torch.Generator().manual_seed(chunk)
    states, head = torch.randn(ROWS, WIDTH, generator=g), torch.randn(IDS, WIDTH, generator=g)
    aims = some_aims(g, teacher=teacher)
    for ours, plain in zip(
        gradients(token_losses, states, head, aims), gradients(plain_token_losses, states, head, aims), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_under_autocast_they_are_those_of_bfloat16_products() -> None:
    g = torch.Generator().manual_seed(1)
    states, head = torch.randn(ROWS, WIDTH, generator=g), torch.randn(IDS, WIDTH, generator=g)
    aims = some_aims(g)
    exact = gradients(token_losses, states, head, aims)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradients(token_losses, states, head.bfloat16(), aims)
    assert rounded[0].dtype == torch.float32
    for ours, plain in ((rounded[0], exact[0]), (rounded[2], exact[2]), (rounded[3].float(), exact[3])):
        assert float((ours - plain).norm() / plain.norm()) < 0.02


def test_the_divergence_is_from_the_teacher_renormalised_over_what_is_there() -> None:
    g = torch.Generator().manual_seed(2)
    states, head = torch.randn(1, WIDTH, generator=g), torch.randn(IDS, WIDTH, generator=g)
    base = torch.tensor([[0.5, 0.3, 0.1]]).log()
    aims = token_targets(torch.tensor([-1]), (torch.tensor([[7, -1, 9]]), base), cross_entropy=1.0, distillation=1.0)
    model = F.linear(states, head).log_softmax(-1)[:, [7, 9]]
    divergence = F.kl_div(model, torch.tensor([[5 / 6, 1 / 6]]), reduction="sum")
    loss, likeliest = token_losses(states, head, aims)
    torch.testing.assert_close(loss, divergence * (0.6 / 0.9), rtol=1e-4, atol=1e-5)
    assert likeliest.tolist() == F.linear(states, head).argmax(-1).tolist()
    nothing = token_targets(
        torch.tensor([-1]), (torch.tensor([[-1, -1, -1]]), base), cross_entropy=1.0, distillation=1.0
    )
    assert token_losses(states, head, nothing)[0].item() == 0


def test_no_rows_cost_nothing() -> None:
    states = torch.empty(0, WIDTH, requires_grad=True)
    aims = token_targets(torch.empty(0, dtype=torch.int64), None, cross_entropy=1.0, distillation=0.0)
    loss, likeliest = token_losses(states, torch.randn(IDS, WIDTH), aims)
    loss.backward()
    assert loss.item() == 0
    assert len(likeliest) == 0
