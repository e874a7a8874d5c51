"""Rows that change their logits, on the compiled kernels: they choose what they do by all logits, whatever way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from hamburger.model.batch import Adjustments, ForwardBatch, SamplingBatch, StepOutput, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.backend import CpuBackend
from hamburger.model.cpu.emission import CpuChoices, CpuEmission
from hamburger.model.cpu.library import Kernels, load_kernels
from hamburger.model.emission.narrowing import NarrowingEmission
from native_models import WIDE, models
from small_models import CPU, graft_config, trunk_config

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")
VOCAB_SIZE = 1005  # no whole block of outputs, nor a whole word of a mask
WIDTH = 4


class RandomMasks:
    """A Constraint whose rows may choose few tokens, most, or all but one; other ones after each token."""

    def __init__(self, rows: list[int], seed: int) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int64)
        self._seed, self._taken = seed, dict.fromkeys(rows, 0)

    def allowed(self, rows: Tensor) -> Tensor:
        words = -(-VOCAB_SIZE // 32)
        masks = torch.zeros(len(rows), words, dtype=torch.int32)
        for i, row in enumerate(rows.tolist()):
            rng = random.Random(f"{self._seed} {row} {self._taken[row]}")
            number = rng.choice((1, 2, 40, VOCAB_SIZE // 2, VOCAB_SIZE - 1))
            for token in rng.sample(range(VOCAB_SIZE), number):
                masks[i, token // 32] |= -(2**31) if token % 32 == 31 else 1 << token % 32
        return masks

    def advance(self, rows: Tensor, tokens: Tensor) -> Tensor:
        for row in rows.tolist():
            if row in self._taken:
                self._taken[row] += 1
        return torch.zeros(len(rows), dtype=torch.bool)


def adjustments_of(rows: list[int], rng: random.Random, likely: list[list[int]]) -> Adjustments:
    """Of some rows; likely: each row's likeliest tokens, so that what is changed counts."""

    def some(row: int, most: int) -> list[int]:
        number = rng.randrange(most + 1)
        return [rng.choice((rng.randrange(VOCAB_SIZE), rng.choice(likely[row]))) for _ in range(number)]

    def padded(lists: list[list[int]]) -> Tensor:
        width = max(map(len, lists), default=0)
        return torch.tensor([[*one, *[-1] * (width - len(one))] for one in lists], dtype=torch.int64).view(
            len(lists), width
        )

    def numbers(*among: float) -> Tensor:
        return torch.tensor([rng.choice(among) for _ in rows])

    prompts, outputs = [some(row, 60) for row in rows], [some(row, 200) for row in rows]
    bias = [(i, token, rng.uniform(-30, 30)) for i, row in enumerate(rows) for token in sorted(set(some(row, 6)))]
    repetition = numbers(1.0, 1.3, 0.7, 2.0)
    return Adjustments(
        row=torch.tensor(rows),
        prompt_ids=padded([ids if r != 1 else [] for ids, r in zip(prompts, repetition.tolist(), strict=True)]),
        output_ids=padded(outputs),
        presence=numbers(0.0, 0.7, -1.5),
        frequency=numbers(0.0, 0.13, 1.9, -0.4),
        repetition=repetition,
        bias_row=torch.tensor([i for i, _, _ in bias], dtype=torch.int64),
        bias_id=torch.tensor([token for _, token, _ in bias], dtype=torch.int64),
        bias=torch.tensor([value for _, _, value in bias]),
        min_index=torch.tensor([rng.choice((0, 3, 100)) for _ in rows]),
        any_penalties=True,
    )


def sampling_of(
    rows: int, rng: random.Random, likely: list[list[int]], filters: dict[str, float], temperatures: list[float]
) -> SamplingBatch:
    changed = sorted(rng.sample(range(rows), rng.randrange(rows // 2, rows) + 1))
    return replace(
        empty_sampling(rows, CPU),
        temperature=torch.tensor([rng.choice(temperatures) for _ in range(rows)]),
        top_k=torch.full((rows,), int(filters.get("top_k", 0))),
        top_p=torch.full((rows,), filters.get("top_p", 1.0)),
        seed=torch.arange(rows),
        output_index=torch.tensor([rng.randrange(6) for _ in range(rows)]),
        end_ids=torch.tensor([[rng.choice(likely[row]), -1] for row in range(rows)]),
        adjustments=adjustments_of(changed, rng, likely),
        any_sampled=any(temperatures),
        any_filtered=bool(filters),
    )


def batch_of(sampling: SamplingBatch) -> ForwardBatch:
    rows = len(sampling.seed)
    batch = SimpleNamespace(
        max_group_limit=WIDTH,
        checks=torch.full((rows,), -1),
        confidence=torch.zeros(rows),
        group_limits=torch.full((rows,), WIDTH),
        sampling=sampling,
    )
    return cast(ForwardBatch, batch)


@pytest.mark.parametrize("short_list", [None, 300])
@pytest.mark.parametrize(
    ("temperatures", "filters"), [([0.0], {}), ([0.0, 0.7, 1.5], {}), ([0.0, 0.7, 1.5], {"top_k": 5, "top_p": 0.9})]
)
@pytest.mark.parametrize("rows", [1, 6, 20])
@pytest.mark.parametrize("has_masks", [False, True])
def test_changed_rows_choose_what_they_do_by_all_logits(
    has_masks: bool,
    rows: int,
    filters: dict[str, float],
    temperatures: list[float],
    short_list: int | None,
    kernels: Kernels,
) -> None:
    config = ModelConfig(
        trunk=trunk_config(**WIDE, vocab_size=VOCAB_SIZE), graft=graft_config(short_list_size=short_list)
    )
    backend = cast(CpuBackend, models(config, seed=11, kernels=kernels)[1].backend)
    by_logits = NarrowingEmission(backend, backend.graft.draw)

    def begin(batch: ForwardBatch, token_ids: Tensor) -> CpuChoices:
        found = CpuChoices.begin(backend, batch, token_ids)
        assert found is not None
        return found

    one_by_one = NarrowingEmission(backend, backend.graft.draw, begin)
    num_changed = 0
    for seed in range(3):
        rng = random.Random(f"{seed} {rows} {len(temperatures)}")
        generator = torch.Generator().manual_seed(seed)
        hidden, *states = torch.randn(1 + len(graft_config().feature_layers), rows, 64, generator=generator)
        likely = backend.head(hidden).topk(8).indices.tolist()
        sampling = sampling_of(rows, rng, likely, filters, temperatures)

        def groups(
            emit: Callable[[Tensor, list[Tensor], ForwardBatch], StepOutput],
            sampling: SamplingBatch = sampling,
            hidden: Tensor = hidden,
            states: list[Tensor] = states,
            seed: int = seed,
        ) -> StepOutput:
            constraint = RandomMasks(list(range(0, rows, 2)), seed) if has_masks else None
            return emit(hidden, states, batch_of(replace(sampling, constraint=constraint)))

        wanted = groups(by_logits.emit)
        ways = [one_by_one.emit] if has_masks else [one_by_one.emit, CpuEmission(backend.graft).emit]
        for way in ways:
            found = groups(way)
            assert found.group_sizes.tolist() == wanted.group_sizes.tolist()
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
            off = 1e-4 if any(temperatures) and (filters or rows > 16) else 0.05  # 4 bits of what is unlikely
            torch.testing.assert_close(found.stop_probs, wanted.stop_probs, atol=off, rtol=0)
        plain = by_logits.emit(hidden, states, batch_of(replace(sampling, adjustments=None)))
        num_changed += int((plain.token_ids[:, 0] != wanted.token_ids[:, 0]).sum())
    assert num_changed >= rows  # else nothing was tried
