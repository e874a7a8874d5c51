"""The sampler: filters against their definitions, noise, penalties inside a group, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hamburger.model.batch import stop_probability
from hamburger.model.config import ModelConfig
from hamburger.model.noise import noise_keys
from hamburger.model.sampler import sample, token_logprobs
from small_models import core_of, graft_config, params, random_model, run_core, tokens_of, trunk_config

I64, F32 = torch.int64, torch.float32


def keys_of(rows: int, seed: int = 0) -> Tensor:
    return noise_keys(torch.full((rows,), seed), torch.arange(rows))


def kept_by_definition(logits: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that may be drawn, spelled out in float64 (vLLM's order: min-p, top-k, top-p)."""
    probs = logits.double().softmax(-1).tolist()
    ranked = sorted(range(len(probs)), key=lambda i: -probs[i])
    ranked = [i for i in ranked if probs[i] >= min_p * probs[ranked[0]]]
    if top_k:
        ranked = ranked[:top_k]
    mass, before, kept = sum(probs[i] for i in ranked), 0.0, set()
    for i in ranked:
        if before < top_p * mass or top_p >= 1:
            kept.add(i)
        before += probs[i]
    return kept


@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([5, 300, 700]),
    top_k=st.sampled_from([0, 1, 3, 40, 299, 500]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
)
@settings(max_examples=150)
def test_draws_come_from_what_the_filters_keep(
    seed: int, size: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(size, generator=generator)
    kept = kept_by_definition(logits, top_k, top_p, min_p)
    n = 32
    drawn = sample(
        logits.expand(n, -1),
        torch.ones(n),
        torch.full((n,), top_k, dtype=I64),
        torch.full((n,), top_p, dtype=F32),
        torch.full((n,), min_p, dtype=F32),
        keys_of(n, seed),
    ).tolist()
    # float32 rounding may move the border of the nucleus by one token.
    border = kept_by_definition(logits, top_k, min(1.0, top_p * (1 + 1e-6)), min_p * (1 - 1e-6))
    assert set(drawn) <= kept | border


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (400, 0.9, 0.0)]
)
def test_frequencies_are_the_renormalised_probabilities(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(600, generator=torch.Generator().manual_seed(1)) * 1.5
    kept = sorted(kept_by_definition(logits * 2, top_k, top_p, min_p))
    n = 4_000
    drawn = sample(
        logits.expand(n, -1),
        torch.full((n,), 0.5),
        torch.full((n,), top_k, dtype=I64),
        torch.full((n,), top_p, dtype=F32),
        torch.full((n,), min_p, dtype=F32),
        keys_of(n),
    )
    counts = Counter(drawn.tolist())
    probs = (logits.double()[kept] * 2).softmax(-1).tolist()
    for token_id, p in zip(kept, probs, strict=True):
        assert counts[token_id] / n == pytest.approx(p, abs=5 * math.sqrt(p / n) + 2 / n)
    assert sum(counts[token_id] for token_id in kept) == n


def test_a_rows_draw_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 700, generator=generator)
    top_k = torch.tensor([0, 5, 0, 500] * 10)
    top_p = torch.tensor([1.0, 1.0, 0.95, 1.0] * 10)
    min_p = torch.tensor([0.0, 0.1, 0.0, 0.0] * 10)
    temperature, keys = torch.rand(40, generator=generator) + 0.1, keys_of(40)
    together = sample(logits, temperature, top_k, top_p, min_p, keys)
    for i in range(40):
        one = slice(i, i + 1)
        assert sample(logits[one], temperature[one], top_k[one], top_p[one], min_p[one], keys[one]) == together[one]


MODEL = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()), seed=12)
PROMPT = [5, 9, 13, 40, 41]


def answer(**fields: Any) -> list[int]:
    sampling = params(**{"max_tokens": 40, "ignore_eos": True, "confidence": 0.0, **fields})
    return tokens_of(run_core(core_of(MODEL), {"r": (PROMPT, sampling)})["r"])


def test_same_seed_same_text_and_another_seed_another_text() -> None:
    assert answer(temperature=1.0, seed=3) == answer(temperature=1.0, seed=3)
    assert answer(temperature=1.0, seed=3) != answer(temperature=1.0, seed=4)


def test_temperature_zero_is_greedy_whatever_the_filters_say() -> None:
    assert answer(temperature=0.0, top_p=0.5, top_k=7, min_p=0.3) == answer(temperature=0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_p": 1e-46},
        {"temperature": 1.0, "top_k": 1, "top_p": 1e-46, "min_p": 1.0},
    ],
)
def test_the_smallest_settings_are_greedy_and_not_an_overflow(fields: dict[str, float]) -> None:
    assert answer(**fields) == answer(temperature=0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**62},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 1e3},
        {"temperature": 100.0},
        {"min_tokens": 40, "stop_token_ids": tuple(range(96))},  # every token is forbidden
        {"logit_bias": dict.fromkeys(range(96), -100.0)},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_settings_still_give_tokens(fields: dict[str, Any], temperature: float) -> None:
    tokens = answer(**{"temperature": temperature, **fields})
    assert len(tokens) == 40
    assert all(0 <= token_id < 96 for token_id in tokens)


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    assert answer(temperature=5.0, top_k=1) == answer(temperature=0.0)


def test_logit_bias_forces_and_bans_at_every_micro_step() -> None:
    assert set(answer(logit_bias={77: 100.0})) == {77}
    banned = answer(logit_bias=dict.fromkeys(answer(), -100.0))
    assert not set(banned) & set(answer())


def test_penalties_see_the_tokens_of_their_own_group() -> None:
    # A strong frequency penalty makes every token distinct, so within a group too.
    tokens = answer(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=50.0)
    assert len(set(tokens)) == len(tokens)
    assert not set(tokens) & set(PROMPT)  # repetition_penalty also sees the prompt
    plain = answer()
    assert len(set(plain)) < len(plain)


def test_min_tokens_forbids_end_tokens_and_stop_tokens_only_until_then() -> None:
    free = answer()
    stop = free[2]
    ended = answer(stop_token_ids=(stop,))
    assert ended == free[: free.index(stop) + 1]
    held = answer(stop_token_ids=(stop,), min_tokens=12)
    assert stop not in held[:12]
    assert len(held) >= 13 or held[-1] != stop


def test_logprobs_are_of_the_unchanged_distribution_one_entry_a_token() -> None:
    sampling = params(max_tokens=20, ignore_eos=True, confidence=0.0, temperature=2.0, seed=1, logprobs=5)
    biased = params(max_tokens=20, ignore_eos=True, confidence=0.0, logit_bias={77: 100.0}, logprobs=0)
    outputs = run_core(core_of(MODEL), {"a": (PROMPT, sampling), "b": (PROMPT, biased), "c": (PROMPT, params())})
    assert all(output.logprobs is None for output in outputs["c"])
    for output in outputs["a"]:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            assert len(entry.top) == 5
            assert sum(map(math.exp, values)) <= 1 + 1e-5
            assert dict(entry.top).get(token_id, entry.logprob) == entry.logprob
            assert entry.logprob <= values[0]
    entries = [entry for output in outputs["b"] for entry in output.logprobs or []]
    assert len(entries) == 20
    assert all(entry.logprob < -1 for entry in entries)  # forced, and unlikely by the model's own distribution
    assert all(entry.top == [] for entry in entries)


def test_token_logprobs_equal_log_softmax() -> None:
    logits = torch.randn(3, 50)
    tokens = torch.tensor([4, 0, 49])
    found = token_logprobs(logits, tokens, 3)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(found.chosen, expected[range(3), tokens])
    torch.testing.assert_close(found.top, expected.sort(descending=True).values[:, :3])
    torch.testing.assert_close(expected.gather(1, found.top_ids), found.top)


@pytest.mark.parametrize("size", [1, 7, 8, 15, 33])
def test_stop_probabilities_are_the_same_bits_wherever_a_row_lies(size: int) -> None:
    stops = torch.cat((torch.randn(200, generator=torch.Generator().manual_seed(3)) * 6, torch.tensor([-200.0, 200.0])))
    found = torch.cat([stop_probability(part) for part in stops.split(size)])
    assert torch.equal(found, stop_probability(stops))
    torch.testing.assert_close(found, stops.sigmoid(), atol=2e-7, rtol=2e-6)
