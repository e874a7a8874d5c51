"""Noise of sampled tokens: its distribution, what it is keyed by, and that who finds the same likely draws the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hamburger.model.noise import _mix, chance_with_noise, noise, noise_keys

ROWS = 20_000
KEYS = noise_keys(torch.arange(ROWS) // 100, torch.arange(ROWS) % 100)
TOKENS = torch.tensor([0, 1, 2, 64, 65, 1024, 40_000, 49_151, 128_255])


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    return (-(-noise(keys, token_ids)).exp()).exp()


def test_splitmix64_is_the_published_generator() -> None:
    """seed 0, index 0 goes through the finaliser twice; the first output of SplitMix64(0) is 0xE220A8397B1DCDAF."""
    assert int(_mix(torch.tensor(0))) & (2**64 - 1) == 0xE220A8397B1DCDAF


def test_keys_are_of_seed_and_index() -> None:
    assert len(set(KEYS.tolist())) == ROWS
    assert torch.equal(noise_keys(torch.tensor([3]), torch.tensor([7])), KEYS[307:308])


def test_noise_is_gumbel_and_one_tokens_says_nothing_of_anothers() -> None:
    u = uniform(KEYS, TOKENS)
    assert bool(((u > 0) & (u < 1)).all())
    for column in u.T:  # chi-squared with 49 degrees: above 110 once in a million
        counts = torch.histc(column.float(), bins=50, min=0, max=1)
        assert float(((counts - ROWS / 50) ** 2 / (ROWS / 50)).sum()) < 110
    centred = (u - 0.5) * 12**0.5
    together = centred.T @ centred / ROWS
    assert float((together - torch.eye(len(TOKENS))).abs().max()) < 0.04  # five deviations
    rows = centred.view(200, 100, -1)  # neighbouring seeds and indices
    for a, b in ((rows[:-1], rows[1:]), (rows[:, :-1], rows[:, 1:])):
        assert abs(float((a * b).mean())) < 0.015


def test_where_all_are_as_likely_every_token_is_drawn_as_often() -> None:
    """Whose noise is the largest of a whole vocabulary lies in its furthest tail."""
    drawn = noise(KEYS[:4000], torch.arange(49_152)).argmax(-1)
    counts = torch.histc(drawn.float(), bins=32, min=0, max=49_152)
    assert float(((counts - 125) ** 2 / 125).sum()) < 80  # 31 degrees: three in a million


def test_of_a_list_a_token_has_the_noise_that_it_has_of_all() -> None:
    whole = noise(KEYS[:3], torch.arange(1000))
    some = torch.tensor([[1, 999], [5, 6], [0, 500]])
    assert torch.equal(noise(KEYS[:3], some), whole.gather(1, some))


@pytest.mark.parametrize("off", [0.05, 0.5])
def test_who_finds_nearly_the_same_likely_draws_nearly_the_same(off: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, generator=generator)
    other = logits + off * torch.randn(500, generator=generator)
    p, q = logits.double().softmax(-1), other.double().softmax(-1)
    apart = float((p - q).abs().sum() / 2)
    gumbel = noise(KEYS[:5000], torch.arange(500))
    same = ((gumbel + logits).argmax(-1) == (gumbel + other).argmax(-1)).double().mean()
    # No two draws of p and q are the same more often than 1 - apart; these are at least (1 - apart) / (1 + apart) so.
    assert (1 - apart) / (1 + apart) - 0.03 < float(same) < 1 - apart + 0.03


def test_a_draw_that_is_far_ahead_is_likelier_to_be_anothers_too() -> None:
    p = torch.tensor([0.01, 0.5, 0.99, 1.0, 0.5, 0.5])
    of_noise = torch.tensor([0.0, 0.0, 0.0, 0.0, -3.0, 3.0])
    found = chance_with_noise(p, of_noise)
    assert found.tolist() == pytest.approx([0.0197, 0.2405, 0.8331, 0.9998, 0.0498, 0.6570], abs=2e-4)
