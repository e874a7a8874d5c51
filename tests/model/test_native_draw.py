"""Draws of the compiled kernels: torch's, and their own to the bit wherever a token stands."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hamburger.model.batch import ForwardBatch, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.emission import CpuEmission
from hamburger.model.cpu.graft import CpuGraft, PackedHead
from hamburger.model.cpu.library import InstructionSet, Kernels, load_kernels
from hamburger.model.cpu.weights import PackedWeight
from hamburger.model.noise import noise_keys
from hamburger.model.sampler import sample
from small_models import CPU, trunk_config

SETS: tuple[InstructionSet, ...] = ("avx512bf16", "avx512", "avx2")
CONFIG = ModelConfig(trunk=trunk_config(hidden_size=64, intermediate_size=96, head_dim=32))
pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")


@pytest.fixture(params=SETS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    found = load_kernels(request.param)
    if found is None:
        pytest.skip(f"this processor has no {request.param}")
    return found


@pytest.fixture(scope="module")
def emitter(kernels: Kernels) -> CpuGraft:
    return CpuGraft(kernels, CONFIG, PackedHead(kernels, torch.zeros(16, 64)), None)


def filters(
    rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how = torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p)
    return *how, torch.full((rows,), min_p)


def scaled(seed: int, size: int, spread: float) -> Tensor:
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return logits - logits.max()


def keys_of(rows: int, seed: int = 0) -> Tensor:
    return noise_keys(torch.full((rows,), seed), torch.arange(rows))


FILTERS = {
    "top_k": st.sampled_from([0, 1, 3, 40, 299, 500]),
    "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    "seed": st.integers(0, 10_000),
    "spread": st.sampled_from([0.1, 1.0, 4.0, 20.0]),
}


def allowed(logits: Tensor, top_k: int, top_p: float, min_p: float, temperature: float) -> Tensor:
    """By the definition, in float64: the tokens that may be drawn."""
    probs, ids = (logits.double() / temperature).softmax(-1).sort(descending=True, stable=True)
    keep = probs >= min_p * probs[0]
    keep[top_k or len(probs) :] = False
    probs = probs * keep / (probs * keep).sum()
    keep &= (probs.cumsum(0) - probs < top_p) | (top_p >= 1)
    return ids[keep]


@given(
    size=st.sampled_from([1, 5, 16, 300, 3000]), temperature=st.sampled_from([1.0, 0.7, 0.01, 1e-40, 3.0]), **FILTERS
)
@settings(max_examples=150)
def test_draws_are_torchs(
    emitter: CpuGraft, seed: int, size: int, spread: float, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    rows = scaled(seed, size, spread).expand(40, -1)
    how, keys = filters(40, top_k, top_p, min_p, temperature), keys_of(40, seed)
    drawn = emitter.draw(rows, *how, keys)
    same = drawn == sample(rows, *how, keys)
    if temperature == 1 or (top_p >= 1 and not min_p):  # else float32 may move the border of the nucleus by a token
        assert torch.isin(drawn, allowed(rows[0], top_k, top_p, min_p, temperature)).all()
    assert same.all() if top_p >= 1 and not min_p else same.double().mean() > 0.9


@given(kept=st.integers(1, 200), **FILTERS)
@settings(max_examples=100)
def test_what_may_not_be_chosen_shifts_no_draw(
    emitter: CpuGraft, seed: int, kept: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """So a grammar that allows what a row would have drawn changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(1000, generator=generator)[:kept].sort().values
    some = torch.full((20, 1000), float("-inf"))
    some[:, ids] = scaled(seed, kept, spread)
    how, keys = filters(20, top_k, top_p, min_p), keys_of(20, seed)
    alone = some[:, : int(ids[-1]) + 1].contiguous()
    assert torch.equal(emitter.draw(some, *how, keys), emitter.draw(alone, *how, keys))


def test_frequencies_are_the_probabilities(emitter: CpuGraft) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    n = 40_000
    for how, wanted in (
        (filters(n), [0.5, 0.3, 0.15, 0.05]),
        (filters(n, top_k=2), [0.625, 0.375, 0, 0]),
        (filters(n, top_p=0.9), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (filters(n, min_p=0.2), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    ):
        share = emitter.draw(logits.expand(n, -1), *how, keys_of(n)).bincount(minlength=4) / n
        assert share.tolist() == pytest.approx(wanted, abs=0.01)  # four deviations


def test_of_equal_tokens_the_first_are_kept(emitter: CpuGraft) -> None:
    drawn = emitter.draw(torch.zeros(50, 70), *filters(50, top_k=3), keys_of(50))
    assert sorted(set(drawn.tolist())) == [0, 1, 2]


def test_where_nothing_is_left_it_is_the_first(emitter: CpuGraft) -> None:
    nothing = torch.full((1, 70), float("-inf"))
    for how in (filters(1), filters(1, top_k=3, top_p=0.5)):
        assert emitter.draw(nothing, *how, keys_of(1)) == 0
        assert emitter.draw(nothing * float("nan"), *how, keys_of(1)) == 0


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 20, 69])
def test_a_broken_logit_leaves_the_row(emitter: CpuGraft, broken: float, at: int) -> None:
    """What is drawn then means nothing, but it is a token."""
    logits = scaled(0, 70, 4.0).repeat(16, 1)
    logits[:, at] = broken
    for how in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 40, "top_p": 0.9}):
        drawn = emitter.draw(logits, *filters(16, **how), keys_of(16))
        assert ((drawn >= 0) & (drawn < 70)).all()


@pytest.mark.parametrize("temperature", [1e-40, 0.05, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_coarse_head_draws_what_the_whole_one_does(kernels: Kernels, rows: int, temperature: float) -> None:
    weight = torch.randn(40, 64).repeat_interleave(80, 0) + 0.02 * torch.randn(3200, 64)
    packed = PackedWeight(kernels, weight, None, 8)
    emitter = CpuGraft(kernels, CONFIG, PackedHead(kernels, weight), None)
    how = torch.full((rows,), temperature), torch.zeros(rows).long(), torch.ones(rows), torch.zeros(rows)
    num_likeliest = 0
    for seed, scale in enumerate((1.0, 0.3, 0.1, 0.1, 0.0)):
        hidden = torch.randn(rows, 64) * scale
        logits = packed.multiply(hidden)
        sampling = replace(
            empty_sampling(rows, CPU),
            temperature=how[0],
            seed=torch.full((rows,), seed),
            output_index=torch.arange(rows),
            any_sampled=True,
            any_filtered=False,
        )
        batch = SimpleNamespace(
            max_group_limit=1,
            checks=torch.full((rows,), -1),
            confidence=torch.ones(rows),
            group_limits=torch.ones(rows).long(),
            sampling=sampling,
        )
        chosen = CpuEmission(emitter).emit(hidden, [], cast(ForwardBatch, batch)).token_ids[:, 0]
        keys = noise_keys(sampling.seed, sampling.output_index)
        assert torch.equal(chosen, emitter.draw(logits, *how, keys))
        assert torch.equal(chosen, sample(logits, *how, keys)) or temperature < 1e-30  # ties are the first's there
        num_likeliest += int((logits.argmax(-1) == chosen).sum())
    assert num_likeliest == 5 * rows or temperature > 1e-30
