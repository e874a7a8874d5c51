"""Experts on the compiled kernels: near the plain ones, and a slot's numbers are its own to the bit, whoever is beside
it, on however many threads, and whatever is drafted or settles."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch

from hamburger.engine.types.messages import GroupOutput
from hamburger.engine.types.settling import Settling
from hamburger.model.assemble import assemble
from hamburger.model.config import ExpertsConfig, ModelConfig
from hamburger.model.cpu.library import InstructionSet, load_kernels
from hamburger.model.execution import Execution
from hamburger.model.steps import EagerSteps
from lora_folders import lora_folder
from native_models import WIDE, models
from slow_cases import slow_but
from small_models import CPU, core_of, params, random_tensors, run_core, tokens_of, trunk_config
from trunk_shapes import MIXTURES, QWEN3_MOE
from verified import free_rows

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")

# More experts than threads, and more than some batches reach; a prompt of 70 slots is no whole number of tiles.
SHAPE: dict[str, Any] = {
    **QWEN3_MOE, **WIDE, "experts": ExpertsConfig(number=9, per_token=3, width=96, sum_to_one=True, dense_layers=(2,)),
}  # fmt: skip
PROMPTS = {str(n): [(7 * n + j) % 90 + 2 for j in range(n)] for n in (1, 2, 9, 31, 70)}


def native(bits: int = 8, instructions: InstructionSet | None = None, poison: int | None = None) -> EagerSteps:
    """poison: a token whose embedding is no number."""
    kernels, config = load_kernels(instructions), ModelConfig(trunk=trunk_config(**SHAPE))
    if kernels is None:
        pytest.skip("this processor has no such instructions")
    tensors = random_tensors(config, 4)
    if poison is not None:
        tensors["model.embed_tokens.weight"][poison, 5] = float("nan")
    return assemble(
        config, tensors, dtype=torch.float32, device=CPU, max_positions=256,
        execution=Execution(kernels=kernels, bits=bits),
    )  # fmt: skip


def answers(steps: EagerSteps, names: Iterable[str] = PROMPTS, **core: Any) -> dict[str, list[object]]:
    """Tokens and log-probabilities of each prompt's answer, without drafts."""
    asked = {n: (PROMPTS[n], params(max_tokens=8, logprobs=3, ignore_eos=True, confidence=1.0)) for n in names}
    return {name: numbers(groups) for name, groups in run_core(core_of(steps, **core), asked).items()}


def numbers(groups: list[GroupOutput]) -> list[object]:
    told = [entry for group in groups for entry in group.logprobs or ()]
    return [tokens_of(groups), *((entry.logprob, entry.top) for entry in told)]


@pytest.mark.parametrize(
    ("bits", "instructions"),
    slow_but([(4, "avx512"), (8, "avx2")], [(4, "avx512"), (8, "avx512"), (4, "avx2"), (8, "avx2")]),
)
def test_neither_batch_nor_chunks_nor_threads_change_a_bit(bits: int, instructions: InstructionSet) -> None:
    steps, before = native(bits, instructions), torch.get_num_threads()
    wanted = answers(steps)
    assert len({str(numbers) for numbers in wanted.values()}) == len(wanted)
    for name in PROMPTS:
        assert answers(steps, [name], max_num_batched_slots=32) == {name: wanted[name]}
    try:
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert answers(steps, max_num_batched_slots=48) == wanted
    finally:
        torch.set_num_threads(before)


def test_a_slot_that_is_no_number_harms_no_other() -> None:
    steps = native(poison=95)
    wanted = answers(steps, ["9"])
    asked = params(max_tokens=8, logprobs=3, ignore_eos=True, confidence=1.0)
    found = run_core(core_of(steps), {"bad": ([3, 95, 4], asked), "9": (PROMPTS["9"], asked)})
    assert numbers(found["9"]) == wanted["9"]
    assert isnan((found["bad"][0].logprobs or [])[0].logprob)


def test_drafts_from_text_change_no_bit() -> None:
    steps = native()
    wanted = answers(steps)
    for wrong in (3, 7, 100):
        core = core_of(steps, policy=free_rows(4), prefix_cache=True)
        asked = {}
        for name, prompt in PROMPTS.items():
            text = wanted[name][0]
            assert isinstance(text, list)
            predicted = tuple(token if i % wrong else 5 for i, token in enumerate(text, start=1))
            own = params(max_tokens=8, logprobs=3, ignore_eos=True, confidence=0.0, prediction_ids=predicted)
            asked[name] = (prompt, own)
        found = run_core(core, asked)
        assert any(group.drafts for groups in found.values() for group in groups)
        assert {name: numbers(groups) for name, groups in found.items()} == wanted


def test_slots_settle_whoever_is_beside_them() -> None:
    settling = Settling(window=20, keep=1 / 4, growth=1 / 4, chunk=16, apart=8)
    steps = native()

    def settled(names: Iterable[str], confidence: float) -> dict[str, list[GroupOutput]]:
        core = core_of(steps, policy=free_rows(4), settling=settling)
        asked = params(max_tokens=90, ignore_eos=True, confidence=confidence)
        return run_core(core, {name: (PROMPTS[name], asked) for name in names})

    together = settled(PROMPTS, 0.0)
    assert all(groups[-1].dropped_slots > 0 for groups in together.values())
    for name in ("2", "31"):
        assert tokens_of(settled([name], 1.0)[name]) == tokens_of(together[name])


@pytest.mark.parametrize("shape", MIXTURES)
def test_an_adapter_of_attention_is_near_the_plain_one(shape: str, tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(**{**MIXTURES[shape], **WIDE}))
    folder = lora_folder(tmp_path, config, 3)
    asked = {n: (PROMPTS[n], params(max_tokens=1, logprobs=5)) for n in ("1", "2", "9")}
    plain, own = (run_core(core_of(steps, loras=[folder]), asked, loras={"1": 1, "9": 1}) for steps in models(config))
    for name in asked:
        told, other = ((groups[name][0].logprobs or [])[0].top for groups in (plain, own))
        # The plain one does not round what its adapters multiply.
        assert [value for _, value in told] == pytest.approx([value for _, value in other], abs=0.2)
    base = run_core(core_of(models(config)[1]), asked)
    assert [base[n][0].logprobs == own[n][0].logprobs for n in asked] == [False, True, False]
