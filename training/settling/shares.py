"""Shares: of how many heads' places in settled slots each KV head of a model is worth (model/settled_places.py).

Each answer is read by masks, as if its old tokens had settled. For each head the gradient of the loss, which is KL from
the whole model, times what the head would attend to otherwise, tells to first order what it changes if this head keeps
more tokens of each chunk, or fewer. Then all places go where they are worth most. What that says where all heads have
equal places goes too far, so it is asked again where they lie then, and the two are taken together: the ends of the
way between, as integrated gradients take them (arXiv 1703.01365).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.engine.types.settling import Settling
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.slot_choice import SlotChoice
from hamburger.training.settling.choice import dropped_by_head
from hamburger.training.settling.observed import Observed, settled_pass

_ROWS_A_HEAD = 256


def numbers_of_shares(settling: Settling) -> list[int]:
    """Tokens of a chunk that a head with 0, 1, ... shares keeps; with the last it keeps nearly all."""

    def lent(most: int) -> int:
        return SettledPlaces(torch.tensor([[most] + [0] * (most - 1)]), settling.chunk, settling.kept).lent

    most = 1 + math.ceil((settling.chunk - settling.kept) / max(lent(2), 1))
    return [settling.kept + (share - 1) * lent(most) for share in range(most + 1)]


def costs_of_shares(
    model: HamburgerModel, choice: SlotChoice, settling: Settling, texts: Iterable[Observed], shares: Tensor
) -> Tensor:
    """float32 [most + 1, layers, kv_heads]: nats a token, beyond those with `shares` int64 [layers, kv_heads], if a
    head had 0, 1, ... most instead. Texts in which nothing settles tell nothing."""
    held = SettledPlaces(shares, settling.chunk, settling.kept).numbers
    trunk, numbers = model.config.trunk, numbers_of_shares(settling)
    costs, tokens = torch.zeros(len(numbers), trunk.num_layers, trunk.num_kv_heads), 0
    for seen in texts:
        first = next((computed for computed, _ in settling.places(len(seen.surprise))), None)
        if first is None:
            continue
        of_numbers = [
            dropped_by_head(seen, settling, choice, torch.full(costs.shape[1:], number)) for number in numbers
        ]
        changes: list[tuple[Tensor, list[Tensor]]] = []

        def watch(
            attended: Tensor, attend: Callable[[Tensor], Tensor], index: int, of_numbers: list[Tensor] = of_numbers,
            changes: list[tuple[Tensor, list[Tensor]]] = changes,
        ) -> None:  # fmt: skip
            attended.retain_grad()
            with torch.no_grad():
                others = [attend(dropped[index]).float() - attended.float() for dropped in of_numbers]
            changes.append((attended, others))

        states = settled_pass(model, seen, dropped_by_head(seen, settling, choice, held), first, watch)
        states.backward(_gradient(model, seen, states.detach(), first))
        for layer, (attended, others) in enumerate(changes):
            assert attended.grad is not None
            for share, other in enumerate(others):
                each = (attended.grad.float() * other).unflatten(1, (trunk.num_kv_heads, -1))
                costs[share, layer] += each.sum((0, 2)).cpu()
        tokens += len(states) - 1
    return costs / max(tokens, 1)


def _gradient(model: HamburgerModel, seen: Observed, states: Tensor, first: int) -> Tensor:
    """Of the summed KL, with regard to the settled states [n, D]; the last one's token is not there."""
    whole = seen.states[seen.num_prompt + first :]
    states = states.requires_grad_()
    for rows in range(0, len(states) - 1, _ROWS_A_HEAD):
        of = slice(rows, min(rows + _ROWS_A_HEAD, len(states) - 1))
        _kl(model, whole[of], states[of]).backward()
    assert states.grad is not None
    return states.grad


@torch.inference_mode()
def losses(model: HamburgerModel, seen: Observed, dropped_at: Tensor, settling: Settling) -> tuple[float, int]:
    """The summed KL (nats) of a text's tokens after the first place where it settles, and how many they are."""
    first = next(computed for computed, _ in settling.places(len(seen.surprise)))
    states = settled_pass(model, seen, dropped_at, first)
    whole = seen.states[seen.num_prompt + first :]
    total = 0.0
    for rows in range(0, len(states) - 1, _ROWS_A_HEAD):
        of = slice(rows, min(rows + _ROWS_A_HEAD, len(states) - 1))
        total += float(_kl(model, whole[of], states[of]))
    return total, len(states) - 1


def _kl(model: HamburgerModel, whole: Tensor, settled: Tensor) -> Tensor:
    """From the distributions of states [n, D] to those of others, summed."""
    with torch.no_grad():
        p = F.linear(whole, model.head_weight).float().log_softmax(-1)
    q = F.linear(settled, model.head_weight).float().log_softmax(-1)
    return (p.exp() * (p - q)).sum()


def allot(costs: Tensor) -> Tensor:
    """int64 [layers, kv_heads], the shares that cost least together, one a head in the mean. costs: as
    costs_of_shares; of a head each further share is taken to be worth no more than the one before it."""
    layers, heads = costs.shape[1:]
    worth = torch.stack([_falling(head) for head in (costs[:-1] - costs[1:]).flatten(1).T.tolist()], dim=1)
    # Of equal ones the first shares: where nothing is worth anything, each head has its own places.
    best = worth.flatten().argsort(descending=True, stable=True)[: layers * heads]
    return torch.bincount(best % (layers * heads), minlength=layers * heads).view(layers, heads)


def _falling(gains: list[float]) -> Tensor:
    """The nearest numbers that never rise nor go below 0: those that do are pooled with the ones before them."""
    pools: list[tuple[float, int]] = []
    for gain in gains:
        pools.append((max(gain, 0.0), 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return torch.tensor([value for value, number in pools for _ in range(number)])
