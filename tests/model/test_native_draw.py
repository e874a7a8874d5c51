"""Draws of the compiled kernels: torch's, up to its rounding, and their own to the bit wherever a token stands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hamburger.model.config import ModelConfig
from hamburger.model.cpu.graft import CpuGraft, PackedHead
from hamburger.model.cpu.library import InstructionSet, load_kernels
from hamburger.model.sampler import sample
from small_models import trunk_config

SETS: tuple[InstructionSet, ...] = ("avx512", "avx2")
pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")
LAST = 1 - 2**-53


@pytest.fixture(params=SETS, scope="module")
def emitter(request: pytest.FixtureRequest) -> CpuGraft:
    kernels = load_kernels(request.param)
    if kernels is None:
        pytest.skip(f"this processor has no {request.param}")
    weight = torch.zeros(16, 64)
    config = ModelConfig(trunk=trunk_config(hidden_size=64, intermediate_size=96, head_dim=32))
    return CpuGraft(kernels, config, PackedHead(kernels, weight), None)


def filters(rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p)


def scaled(seed: int, size: int, spread: float) -> Tensor:
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return logits - logits.max()


FILTERS = {
    "top_k": st.sampled_from([0, 1, 3, 40, 299, 500]),
    "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    "seed": st.integers(0, 10_000),
    "spread": st.sampled_from([0.1, 1.0, 4.0, 20.0]),
}


def shares(logits: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """By the definition, in float64: the tokens that may be drawn, in order, and where each one's share of u begins."""
    probs = logits.double().softmax(-1)
    if top_k == 0 and top_p >= 1 and min_p == 0:
        return torch.arange(len(probs)), probs.cumsum(0) - probs
    probs, ids = probs.sort(descending=True, stable=True)
    keep = probs >= min_p * probs[0]
    keep[top_k or len(probs) :] = False
    probs = probs * keep / (probs * keep).sum()
    begins = probs.cumsum(0) - probs
    keep &= (begins < top_p) | (top_p >= 1)
    return ids[keep], begins[keep] / probs[keep].sum()


@given(size=st.sampled_from([1, 5, 16, 300, 3000]), **FILTERS)
@settings(max_examples=150)
def test_draws_follow_the_definition(
    emitter: CpuGraft, seed: int, size: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    u = torch.tensor([0.0, LAST, *torch.linspace(0.001, 0.999, 20).tolist()], dtype=torch.float64)
    logits = scaled(seed, size, spread)
    ids, begins = shares(logits, top_k, top_p, min_p)
    ends = torch.cat((begins[1:], torch.ones(1, dtype=torch.float64)))
    rows = logits.expand(len(u), -1)
    drawn = emitter.draw(rows, *filters(len(u), top_k, top_p, min_p), u)
    at = (drawn[:, None] == ids).nonzero()[:, 1]
    assert len(at) == len(u)  # none that the filters leave out
    assert ((begins[at] - 1e-6 < u) & (u < ends[at] + 1e-6)).all()
    same = drawn == sample(rows, *filters(len(u), top_k, top_p, min_p), u)
    assert same.double().mean() > 0.9  # sums of float32 are off by more than ours


@given(kept=st.integers(1, 200), **FILTERS)
@settings(max_examples=100)
def test_what_may_not_be_chosen_shifts_no_draw(
    emitter: CpuGraft, seed: int, kept: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """So a short list draws in one call what a whole row does where a batch goes by parts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(1000, generator=generator)[:kept].sort().values
    short = scaled(seed, kept, spread)[None]
    whole = torch.full((1, 1000), float("-inf")).index_copy_(1, ids, short)
    for u in (0.0, *torch.rand(10, generator=generator, dtype=torch.float64).tolist(), LAST):
        chances = torch.tensor([u], dtype=torch.float64)
        how = filters(1, top_k, top_p, min_p)
        assert emitter.draw(whole, *how, chances) == ids[emitter.draw(short, *how, chances)]


def test_frequencies_are_the_probabilities(emitter: CpuGraft) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    n = 10_000
    u = torch.linspace(0, LAST, n, dtype=torch.float64)
    x = (logits - logits.max()).expand(n, -1)
    for how, wanted in (
        (filters(n), [0.5, 0.3, 0.15, 0.05]),
        (filters(n, top_k=2), [0.625, 0.375, 0, 0]),
        (filters(n, top_p=0.9), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (filters(n, min_p=0.2), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    ):
        share = emitter.draw(x, *how, u).bincount(minlength=4) / n
        assert share.tolist() == pytest.approx(wanted, abs=2e-4)


def test_of_equal_tokens_the_first_are_kept(emitter: CpuGraft) -> None:
    u = torch.linspace(0, LAST, 50, dtype=torch.float64)
    drawn = emitter.draw(torch.zeros(50, 70), *filters(50, top_k=3), u)
    assert sorted(set(drawn.tolist())) == [0, 1, 2]


def test_where_nothing_is_left_it_is_the_last(emitter: CpuGraft) -> None:
    nothing = torch.full((1, 70), float("-inf"))
    for how in (filters(1), filters(1, top_k=3, top_p=0.5)):
        assert emitter.draw(nothing, *how, torch.tensor([0.5], dtype=torch.float64)) == 69
        assert emitter.draw(nothing * float("nan"), *how, torch.tensor([0.5], dtype=torch.float64)) == 69


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 20, 69])
def test_a_broken_logit_leaves_the_row(emitter: CpuGraft, broken: float, at: int) -> None:
    """What is drawn then means nothing, but it is a token."""
    logits = scaled(0, 70, 4.0).repeat(16, 1)
    logits[:, at] = broken
    u = torch.linspace(0, LAST, 16, dtype=torch.float64)
    for how in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 40, "top_p": 0.9}):
        drawn = emitter.draw(logits, *filters(16, **how), u)
        assert ((drawn >= 0) & (drawn < 70)).all()
