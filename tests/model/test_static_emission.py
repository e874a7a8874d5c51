"""The static form of a macro-step chooses what the narrowing form chooses, over random batches of every kind of row."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hamburger.model.assemble import assemble
from hamburger.model.batch import Adjustments, ForwardBatch, SamplingBatch, StepOutput
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.emission.emission import last_confirmed
from hamburger.model.emission.narrowing import NarrowingEmission
from hamburger.model.emission.static import StaticEmission, draw
from hamburger.model.execution import Execution
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.noise import noise_keys
from hamburger.model.sampler import sample
from hamburger.model.steps import EagerSteps
from slow_cases import slow_but
from small_models import CPU, grafted, one_sequence, plain_model, random_model, trunk_config
from trunk_shapes import SHAPES as TRUNKS

GRAFTS: dict[str, dict[str, Any] | None] = {
    "positions": {},
    "positions_normed": {"micro_norm": True, "micro_layers": 3, "stop_scale": (1.0, 0.8, 1.2, 1.0)},
    "fused": {"features": "fused", "micro_norm": True, "stop_bias": (0.1, -0.2, 0.3, 0.0)},
    "short_list": {"features": "fused", "short_list_size": 40},
    "wide_groups": {"max_group": 6, "feature_layers": (0, 2)},
    "merge_adapter": {"adapter_rank": 32},
    "plain_base": None,
}
VOCAB = 96


def model_of(shape: str) -> EagerSteps:
    graft = GRAFTS[shape]
    config = ModelConfig(trunk=trunk_config()) if graft is None else grafted(**graft)
    return random_model(config, seed=len(shape))


def random_batch(model: EagerSteps, draw: random.Random) -> ForwardBatch:
    """What an emission reads of a batch: rows of every kind, some of them rare."""
    m, most = draw.randint(1, 9), model.config.max_group

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def each(*choices: float) -> Tensor:
        return torch.tensor([float(draw.choice(choices)) for _ in range(m)])

    temperature = each(0, 0, 0.3, 1.0, 2.0) if draw.random() < 0.6 else each(0)
    filtered = draw.random() < 0.7
    logprobs = [draw.choice([-1, -1, 0, 3]) for _ in range(m)]
    confidence, limits = each(0, 0.2, 0.5, 0.6, 1.0), [draw.randint(1, most) for _ in range(m)]
    sampling = SamplingBatch(
        temperature=temperature,
        top_k=each(0, 1, 5, 50).long() if filtered else ints(*[0] * m),
        top_p=each(0.1, 0.8, 1.0) if filtered else each(1.0),
        min_p=each(0, 0.05, 0.5) if filtered else each(0.0),
        seed=ints(*[draw.randrange(-(2**63), 2**63) for _ in range(m)]),
        output_index=ints(*[draw.randrange(40) for _ in range(m)]),
        end_ids=torch.tensor([[draw.randrange(-1, VOCAB) for _ in range(4)] for _ in range(m)]),
        logprobs=ints(*logprobs),
        any_sampled=bool((temperature > 0).any()),
        any_filtered=filtered,
        max_logprobs=max(logprobs),
        adjustments=random_adjustments(m, draw) if draw.random() < 0.5 else None,
    )
    going = [limit for limit, c in zip(limits, confidence.tolist(), strict=True) if c < 1]
    return replace(
        one_sequence([[1]] * m, list(range(m)), list(range(m))),
        confidence=confidence,
        group_limits=ints(*limits),
        max_group_limit=max(going, default=1),
        sampling=sampling,
    )


def random_adjustments(m: int, draw: random.Random) -> Adjustments:
    rows = sorted(draw.sample(range(m), draw.randint(1, m)))

    def ids(width: int) -> Tensor:
        values = [[draw.randrange(-1, VOCAB) for _ in range(width)] for _ in rows]
        return torch.tensor(values, dtype=torch.int64).view(len(rows), width)

    def each(*choices: float) -> Tensor:
        return torch.tensor([float(draw.choice(choices)) for _ in rows])

    entries = [
        (i, token_id) for i in range(len(rows)) for token_id in draw.sample(range(VOCAB), draw.choice([0, 0, 2]))
    ]
    presence, frequency, repetition = each(0, 0.5, -1), each(0, 0.7), each(1, 1.3, 0.8)
    return Adjustments(
        row=torch.tensor(rows),
        prompt_ids=ids(draw.choice([0, 7])),
        output_ids=ids(draw.choice([0, 30])),
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        bias_row=torch.tensor([i for i, _ in entries], dtype=torch.int64),
        bias_id=torch.tensor([token_id for _, token_id in entries], dtype=torch.int64),
        bias=torch.tensor([draw.choice([-100.0, 2.0, 100.0]) for _ in entries]),
        min_index=torch.tensor([draw.choice([0, 20, 100]) for _ in rows]),
        any_penalties=bool(presence.any() or frequency.any() or (repetition != 1).any()),
    )


def emit(model: EagerSteps, batch: ForwardBatch, seed: int, *, static: bool) -> StepOutput:
    generator = torch.Generator().manual_seed(seed)
    graft, rows = model.config.graft, len(batch.emit)
    hidden, *features = torch.randn(1 + (len(graft.feature_layers) if graft else 0), rows, 32, generator=generator)
    with torch.inference_mode():
        emission = (StaticEmission if static else NarrowingEmission)(model.backend)
        return emission.emit(hidden, features, batch)


@pytest.mark.parametrize("shape", slow_but(["positions_normed", "short_list", "plain_base"], GRAFTS))
def test_masks_choose_what_narrowing_chooses(shape: str) -> None:
    model, seen = model_of(shape), Counter[str]()
    for seed in range(150):
        batch = random_batch(model, random.Random(f"{shape} {seed}"))
        narrowed, static = (emit(model, batch, seed, static=m) for m in (False, True))
        assert static.group_sizes.tolist() == narrowed.group_sizes.tolist()
        assert static.token_ids.tolist() == narrowed.token_ids.tolist()
        torch.testing.assert_close(static.stop_probs, narrowed.stop_probs, atol=2e-6, rtol=1e-5)
        assert (static.logprobs is None) == (narrowed.logprobs is None)
        if static.logprobs is not None and narrowed.logprobs is not None:
            seen["logprobs"] += 1
            torch.testing.assert_close(static.logprobs.chosen, narrowed.logprobs.chosen, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(static.logprobs.top, narrowed.logprobs.top, atol=1e-5, rtol=1e-5)
            assert static.logprobs.top_ids.tolist() == narrowed.logprobs.top_ids.tolist()
        sizes = narrowed.group_sizes.tolist()
        seen.update(f"size {size}" for size in sizes)
        seen["ragged"] += len(set(sizes)) > 1
        seen["sampled"] += batch.sampling.any_sampled
        seen["adjusted"] += batch.sampling.adjustments is not None
    wanted = {f"size {size}" for size in range(1, model.config.max_group + 1)}
    wanted |= {"logprobs", "sampled", "adjusted"} | ({"ragged"} if model.config.max_group > 1 else set())
    assert all(seen[what] > 10 for what in wanted), seen  # or the batches prove nothing about them


@pytest.mark.parametrize("shape", slow_but(["positions_normed", "short_list", "plain_base"], GRAFTS))
def test_masks_draft_what_narrowing_drafts(shape: str) -> None:
    """Of the rows that are read; the static form drafts for every other row, too."""
    model, seen = model_of(shape), Counter[str]()
    for seed in range(150):
        draw = random.Random(f"{shape} {seed}")
        batch = random_batch(model, draw)
        m = len(batch.emit)
        alone = replace(batch, checks=torch.full((m,), -1))
        chosen = emit(model, alone, seed, static=False).token_ids[:, 0].tolist()
        # Rows that the next one follows in its sequence, if with another draft than the trunk's choice.
        checks = [-1 if draw.random() < 0.4 else (token + (draw.random() < 0.3)) % VOCAB for token in chosen[:-1]]
        batch = replace(batch, checks=torch.tensor([*checks, -1]))
        narrowed, static = (emit(model, batch, seed, static=m) for m in (False, True))
        assert static.token_ids[:, 0].tolist() == narrowed.token_ids[:, 0].tolist() == chosen
        assert batch.checks is not None
        read = last_confirmed(static.token_ids[:, 0], batch.checks)
        for name in ("group_sizes", "token_ids"):
            assert getattr(static, name)[read].tolist() == getattr(narrowed, name)[read].tolist()
        torch.testing.assert_close(static.stop_probs[read], narrowed.stop_probs[read], atol=2e-6, rtol=1e-5)
        assert narrowed.group_sizes[~read].tolist() == [1] * int((~read).sum())
        if static.logprobs is not None and narrowed.logprobs is not None:
            seen["logprobs"] += 1
            torch.testing.assert_close(static.logprobs.chosen, narrowed.logprobs.chosen, atol=1e-5, rtol=1e-5)
            assert not static.logprobs.chosen[:, 1:].any()
        seen.update(f"size {size}" for size in narrowed.group_sizes[read].tolist())
        seen["sampled"] += batch.sampling.any_sampled
        seen["adjusted"] += batch.sampling.adjustments is not None
        seen["refused"] += int((~read).sum())
    wanted = {f"size {size}" for size in range(1, model.config.max_group + 1)}
    assert all(seen[what] > 4 for what in wanted | {"logprobs", "sampled", "adjusted", "refused"}), seen


@pytest.mark.parametrize("static", [False, True])
def test_a_draft_is_drawn_as_the_trunk_will_draw(*, static: bool) -> None:
    model = model_of("positions_normed")
    base = one_sequence([[1]] * 40, list(range(40)), list(range(40)))
    batch = replace(
        base,
        checks=torch.full((40,), -1),
        confidence=torch.zeros(40),
        group_limits=torch.full((40,), 4),
        max_group_limit=4,
        sampling=replace(base.sampling, temperature=torch.full((40,), 3.0), seed=torch.arange(40), any_sampled=True),
    )
    output = emit(model, batch, 0, static=static)
    assert output.group_sizes.tolist() == [4] * 40
    # What the micro decoder makes of the same tokens.
    generator = torch.Generator().manual_seed(0)
    hidden, *features = torch.randn(4, 40, 32, generator=generator)
    with torch.inference_mode():
        assert output.token_ids[:, 0].tolist() != model.backend.head(hidden).argmax(-1).tolist()
        cache = model.backend.begin_group(torch.stack(features, dim=1))
        off = torch.full((40,), 3.0), torch.zeros(40).long(), torch.ones(40), torch.zeros(40)
        for index in range(1, 4):
            _, logits = model.backend.micro_step(output.token_ids[:, index - 1].contiguous(), cache)
            keys = noise_keys(torch.arange(40), batch.sampling.output_index + index)
            assert output.token_ids[:, index].tolist() == sample(logits, *off, keys).tolist()
            assert output.token_ids[:, index].tolist() != logits.argmax(-1).tolist()
            assert 0 < output.stop_probs[:, index].min() < output.stop_probs[:, index].max() < 1


def test_a_draw_without_branches_is_the_draw_with_them() -> None:
    """Over more tokens than the prefix that `sample` sorts first."""
    generator = torch.Generator().manual_seed(1)
    rows = 400
    logits = torch.randn(rows, 1000, generator=generator) * torch.rand(rows, 1, generator=generator) * 6
    top_k = torch.tensor([0, 0, 3, 255, 256, 700])[torch.arange(rows) % 6]
    top_p = torch.tensor([1.0, 0.99, 0.5, 0.01])[torch.arange(rows) % 4]
    min_p = torch.tensor([0.0, 0.0, 0.2, 1e-4, 0.9])[torch.arange(rows) % 5]
    keys, temperature = noise_keys(torch.arange(rows), torch.arange(rows)), torch.rand(rows, generator=generator) + 0.1
    how = temperature, top_k, top_p, min_p, keys
    assert draw(logits, *how, any_filtered=True).tolist() == sample(logits, *how).tolist()
    off = temperature, torch.zeros(rows, dtype=torch.int64), torch.ones(rows), torch.zeros(rows), keys
    assert draw(logits, *off, any_filtered=False).tolist() == sample(logits, *off).tolist()


def test_merging_without_asking_which_is_merging() -> None:
    embedder = plain_model(grafted(), seed=9).embedder
    e, sizes = (
        torch.randn(9, 4, 32, generator=torch.Generator().manual_seed(2)),
        torch.tensor([1, 2, 3, 4, 1, 4, 2, 2, 3]),
    )
    with torch.inference_mode():
        known = (sizes > 1).nonzero().squeeze(-1)
        asked, unasked = (embedder(e, sizes, rows) for rows in (known, None))
    torch.testing.assert_close(unasked, asked, atol=1e-6, rtol=1e-5)


def test_dynamic_rope_of_short_and_long_texts_together_is_that_of_each_alone() -> None:
    rotary = RotaryEmbedding(trunk_config(**TRUNKS["dynamic_rope"]), 256, CPU, torch.float32)
    positions, lengths = torch.tensor([[3, 60], [200, 70]]), torch.tensor([[4, 64], [201, 90]])
    together = rotary(positions, lengths)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        alone = rotary(positions[i, j : j + 1], lengths[i, j : j + 1])
        for table, one in zip(together, alone, strict=True):
            torch.testing.assert_close(table[i, j], one[0], atol=0, rtol=0)
    within = rotary(positions[0], lengths[0])
    torch.testing.assert_close(within[0], rotary.cos[positions[0]].unsqueeze(-2), atol=0, rtol=0)


def test_the_compiled_kernels_take_no_masks() -> None:
    config = ModelConfig(trunk=trunk_config())
    execution = Execution(kernels=object(), static_shapes=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kernels and static_shapes exclude each other"):
        assemble(config, {}, dtype=torch.float32, device=CPU, max_positions=16, execution=execution)
