"""Groups of the compiled kernels: the plain model's, the same bits in one call or by parts, in any batch, on any number
of threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hamburger.model.batch import ForwardBatch, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.backend import CpuBackend
from hamburger.model.cpu.emission import CpuEmission
from hamburger.model.cpu.library import Kernels, load_kernels
from hamburger.model.emission.narrowing import NarrowingEmission
from native_models import WIDE, models
from small_models import CPU, core_of, graft_config, grafted, params, run_core, trunk_config

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")


@pytest.mark.parametrize("features", ["positions", "fused"])
@pytest.mark.parametrize("short_list", [None, 40])
@pytest.mark.parametrize("adapter_rank", [0, 32])
@pytest.mark.parametrize("draft_bits", [8, 4])
def test_groups_are_those_of_the_plain_model(
    features: str, short_list: int | None, adapter_rank: int, draft_bits: int
) -> None:
    config = grafted(trunk_config(**WIDE), adapter_rank, features=features, short_list_size=short_list)
    plain, native = models(config, seed=12, draft_bits=draft_bits)
    prompts = {str(i): ([5 + i, 6, 7], params(max_tokens=12, confidence=0.3)) for i in range(6)}
    wanted, found = (run_core(core_of(m), prompts) for m in (plain, native))
    first = [(wanted[name][0].token_ids, found[name][0].token_ids) for name in prompts]
    assert any(len(group) > 1 for group, _ in first)
    assert all(a == b for a, b in first)
    probs = [(wanted[n][0].stop_probs, found[n][0].stop_probs) for n in prompts]
    assert all(a[0] == pytest.approx(b[0], abs=0.01) for a, b in probs)


def greedy(i: int) -> dict[str, Any]:
    return {}


def sampled(i: int) -> dict[str, Any]:
    """Request i of many: each fourth is greedy, and the others filter in every way."""
    filters: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    )
    return {"temperature": (0.3, 0.6, 1.2, 0.0)[i % 4], "seed": i, **filters[i % 5]}


@pytest.mark.parametrize("features", ["positions", "fused"])
@pytest.mark.parametrize("micro_norm", [False, True])
@pytest.mark.parametrize("short_list", [None, 40])
@pytest.mark.parametrize("how", [greedy, sampled])
def test_one_call_and_its_parts_agree_to_the_bit(
    features: str, micro_norm: bool, short_list: int | None, how: Callable[[int], dict[str, Any]], kernels: Kernels
) -> None:
    calibration = {"stop_scale": (0.9, 1.1, 1.3, 1.0), "stop_bias": (0.2, -0.1, 0.3, 0.0)}
    graft = graft_config(features=features, micro_norm=micro_norm, short_list_size=short_list, **calibration)
    config = ModelConfig(trunk=trunk_config(**WIDE, eos_token_ids=(9, 11)), graft=graft)
    _, native = models(config, seed=11, kernels=kernels)
    confidences = (1.0, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0)
    for asked in (0, 3):  # log-probabilities: such a batch goes by parts
        prompts = {
            str(i): ([5 + i] * (1 + i), params(max_tokens=25, confidence=c, logprobs=asked or None, **how(i)))
            for i, c in enumerate(confidences)
        }
        groups = run_core(core_of(native), prompts)
        found = {name: [(group.token_ids, group.stop_probs) for group in of] for name, of in groups.items()}
        if not asked:
            in_one_call = found
    assert found == in_one_call
    sizes = {len(tokens) for of in found.values() for tokens, _ in of}
    assert len(sizes) > 2  # rows leave after different tokens


@pytest.mark.parametrize("short_list", [None, 40])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("rows", [7, 20])  # by the head in 4 bits first where there are no filters, and by all logits
def test_drafts_in_one_call_are_those_of_the_parts(
    rows: int, filters: dict[str, float], short_list: int | None, kernels: Kernels
) -> None:
    graft = graft_config(short_list_size=short_list)
    _, native = models(ModelConfig(trunk=trunk_config(**WIDE), graft=graft), seed=11, kernels=kernels)
    backend = cast(CpuBackend, native.backend)
    generator = torch.Generator().manual_seed(rows)
    hidden, *features = torch.randn(1 + len(graft.feature_layers), rows, 64, generator=generator)
    sampling = replace(
        empty_sampling(rows, CPU),
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.5])[torch.arange(rows) % 4],
        top_k=torch.full((rows,), int(filters.get("top_k", 0))),
        top_p=torch.full((rows,), filters.get("top_p", 1.0)),
        seed=torch.arange(rows),
        output_index=3 * torch.arange(rows),
        any_sampled=True,
        any_filtered=bool(filters),
    )
    batch = SimpleNamespace(
        max_group_limit=4,
        checks=torch.full((rows,), -1),
        confidence=torch.zeros(rows),
        group_limits=torch.full((rows,), 4),
        sampling=sampling,
    )
    found = CpuEmission(backend.graft).emit(hidden, features, cast(ForwardBatch, batch))
    wanted = NarrowingEmission(backend, backend.graft.draw).emit(hidden, features, cast(ForwardBatch, batch))
    assert found.group_sizes.tolist() == wanted.group_sizes.tolist() == [4] * rows
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    # Four bits of what is unlikely count in a chance; where all logits are seen, none do.
    off = 1e-4 if filters or rows > 16 else 0.04
    torch.testing.assert_close(found.stop_probs, wanted.stop_probs, atol=off, rtol=0)


def prompts_of(number: int, asked: int | None) -> dict[str, tuple[list[int], Any]]:
    return {
        str(i): ([5 + i] * (3 + 9 * i), params(max_tokens=20, confidence=0.5, logprobs=asked, **sampled(i)))
        for i in range(number)
    }


@pytest.mark.parametrize("asked", [None, 3])  # log-probabilities: without them a batch goes in one call
def test_the_batch_changes_no_bit(asked: int | None) -> None:
    _, native = models(grafted(trunk_config(**WIDE), adapter_rank=32))
    prompts = prompts_of(5, asked)
    together = run_core(core_of(native), prompts)
    for name, prompt in prompts.items():
        alone = run_core(core_of(native, max_num_seqs=4, max_num_batched_slots=7), {name: prompt})
        for ours, theirs in zip(alone[name], together[name], strict=True):
            assert (ours.token_ids, ours.stop_probs, ours.logprobs) == (
                theirs.token_ids,
                theirs.stop_probs,
                theirs.logprobs,
            )


@pytest.mark.parametrize("asked", [None, 3])
def test_the_number_of_threads_changes_no_bit(asked: int | None) -> None:
    """So engine/device/cpu_threads.py may change it between two steps. One long answer alone has its heads shared."""
    _, native = models(grafted(trunk_config(**WIDE), adapter_rank=32))
    alone = {"long": ([7, *range(20, 80)], params(max_tokens=20, confidence=0.5, logprobs=asked))}
    found, before = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3, 8):
            torch.set_num_threads(number)
            found.append([run_core(core_of(native), prompts) for prompts in (prompts_of(5, asked), alone)])
    finally:
        torch.set_num_threads(before)
    assert all(groups == found[0] for groups in found)
