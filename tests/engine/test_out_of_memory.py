"""Steps that memory does not hold: the engine goes on in smaller ones, and no answer but a hopeless one is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fake_engines import fake_config, fake_core, fake_engine
from fakes import ScriptedRunner
from hamburger.engine.core.batch import ScheduledBatch
from hamburger.engine.core.core import EngineCore
from hamburger.engine.device.runner import Runner
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.errors import OutOfMemory
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.engine.types.settling import Settling
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.slot_choice import SlotChoice
from hamburger.model.steps import EagerSteps
from playing import play
from slow_cases import slow_but
from small_models import core_of, graft_config, params, random_model, run_core, tokens_of, trunk_config
from verified import free_rows

Trouble = Callable[[int, ScheduledBatch], bool]


def core_on(runner: ScriptedRunner, config: EngineConfig | None = None, overlap: bool = False) -> EngineCore:
    return fake_core(runner, config, clock=lambda: 0.0, overlap=overlap)


def request(name: str, prompt: list[int], max_tokens: int = 30, priority: int = 0) -> SubmitRequest:
    return SubmitRequest(name, prompt, SamplingParams(max_tokens=max_tokens, seed=3), 0.0, priority)


@pytest.mark.parametrize(
    ("prefix_cache", "overlap"),
    slow_but([(True, False), (False, True)], [(False, False), (True, False), (False, True), (True, True)]),
)
def test_texts_are_the_same_when_steps_fail_here_and_there(prefix_cache: bool, overlap: bool) -> None:
    seen: Counter[str] = Counter()
    for scenario in range(150):
        draw = random.Random(scenario)
        beginnings = [[draw.randrange(4) for _ in range(draw.randint(1, 12))] for _ in range(3)]
        asked = [
            request(f"r{i}", [*draw.choice(beginnings), i], draw.randint(1, 40), draw.choice([0, 0, 1]))
            for i in range(12)
        ]
        fails = {draw.randint(1, 60) for _ in range(8)}

        def trouble(step: int, batch: ScheduledBatch, fails: set[int] = fails) -> bool:
            return step in fails and batch.num_slots > 1

        def core(trouble: Trouble) -> EngineCore:
            config = fake_config(max_model_len=64, num_blocks=40, max_num_batched_slots=32, prefix_cache=prefix_cache)
            return core_on(ScriptedRunner(out_of_memory=trouble), config, overlap)

        calm = play(core(lambda step, batch: False), asked)
        troubled = play(core(trouble), asked)
        assert troubled.tokens == calm.tokens
        seen += troubled.seen
    assert seen["preemptions"] > 100
    assert not seen["out_of_memory"]


@pytest.mark.parametrize("overlap", [False, True])
def test_memory_for_few_slots_serves_everybody_in_small_steps(overlap: bool) -> None:
    asked = [request(f"r{i}", [i] * (20 if i > 9 else 2)) for i in range(20)]
    runner = ScriptedRunner(out_of_memory=lambda step, batch: batch.num_slots > 5)
    found = play(core_on(runner, overlap=overlap), asked)
    assert found.tokens == play(core_on(ScriptedRunner()), asked).tokens
    assert max(sum(slots for _, slots, _ in batch) for batch in runner.batches) == 5
    assert found.seen["preemptions"] > 0


def test_a_step_that_memory_does_not_hold_behind_another_waits_for_it() -> None:
    failed: list[int] = []

    def trouble(step: int, batch: ScheduledBatch) -> bool:
        if any(item.sequence.awaits_group for item in batch.sequences):
            failed.append(step)
            return True
        return False

    asked = [request(f"r{i}", [7] * 9, max_tokens=190) for i in range(6)]
    config = fake_config(max_model_len=256, num_blocks=400, prefix_cache=True)
    runner = ScriptedRunner(out_of_memory=trouble, eos_chance=0)
    found = play(core_on(runner, config, overlap=True), asked, at_once=1)
    assert found.tokens == play(core_on(ScriptedRunner(eos_chance=0), config), asked).tokens
    assert 1 <= len(failed) <= 1 + found.seen["steps"] // 64  # not in every step
    assert found.seen["cache_queries"] == 6 * 9  # also of those that came in with a step that failed


def test_steps_become_large_again_in_calm_times() -> None:
    runner = ScriptedRunner(out_of_memory=lambda step, batch: step <= 3, eos_chance=0)
    core = core_on(runner)
    for i in range(200):
        core.add(request(f"r{i}", [i] * 60, max_tokens=190))
    for _ in range(1500):
        core.step()
    sizes = [sum(slots for _, slots, _ in batch) for batch in runner.batches]
    assert sizes[0] == 8  # 64, halved three times
    assert max(sizes[:64]) == 8
    assert max(sizes[64:128]) == 9
    assert max(sizes) > 60
    core.check_integrity()


def test_a_request_that_memory_does_not_hold_alone_fails_and_the_others_live() -> None:
    def trouble(step: int, batch: ScheduledBatch) -> bool:
        return any(item.sequence.request_id == "r1" for item in batch.sequences)

    asked = [request(f"r{i}", [i] * 9) for i in range(5)]
    calm = play(core_on(ScriptedRunner()), asked).tokens
    found = play(core_on(ScriptedRunner(out_of_memory=trouble)), asked)
    del calm["r1"]
    assert found.tokens == calm
    assert found.seen["out_of_memory"] == 1


async def test_the_client_gets_a_typed_error_and_the_engine_serves_on() -> None:
    runner = ScriptedRunner(out_of_memory=lambda step, batch: batch.sequences[0].sequence.prompt_ids[0] == 9)
    async with fake_engine(runner) as engine:
        [hopeless] = engine.submit([GenerationRequest("bad", [9, 9], SamplingParams())])
        with pytest.raises(OutOfMemory, match="alone") as error:
            [update async for update in hopeless]
        assert error.value.retry_after >= 1
        [stream] = engine.submit([GenerationRequest("good", [1, 2], SamplingParams(max_tokens=4))])
        assert [update async for update in stream][-1].finish_reason is not None


class Starved:
    """A real model's steps, whose device has no memory at chosen ones, when part of the step is done."""

    def __init__(self, steps: EagerSteps, errors: dict[int, Exception]) -> None:
        self._steps, self._errors, self._number = steps, errors, 0
        self.config, self.trunk_config, self.short_list = steps.config, steps.trunk_config, steps.short_list
        self.device, self.state_dtype, self.quantization = steps.device, steps.state_dtype, steps.quantization

    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        self._number += 1
        output = self._steps.step(batch, cache)
        if self._number in self._errors:
            raise self._errors[self._number]
        return output


def test_torchs_errors_become_smaller_steps_of_a_real_model() -> None:
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()), seed=4)
    requests = {
        str(i): ([2 + i, 7, 9] * (1 + i % 4), params(confidence=0.3, temperature=0.8 * (i % 2), seed=i))
        for i in range(8)
    }
    calm = run_core(core_of(model), requests)
    host = RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory")
    library = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    kernel = RuntimeError("Triton Error [CUDA]: out of memory")
    lazy = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    for errors in ([torch.OutOfMemoryError("no"), MemoryError(), host], [library, kernel, lazy]):
        core = core_of(model)
        assert isinstance(core._runner, Runner)
        core._runner._steps = starved = Starved(model, dict(zip((1, 4, 9), errors, strict=True)))
        troubled = run_core(core, requests)
        core.check_integrity()
        assert starved._number > 9
        assert {i: tokens_of(outputs) for i, outputs in troubled.items()} == {
            i: tokens_of(outputs) for i, outputs in calm.items()
        }


def test_other_errors_stay_what_they_are() -> None:
    model = random_model(ModelConfig(trunk=trunk_config()))
    core = core_of(model)
    assert isinstance(core._runner, Runner)
    core._runner._steps = Starved(model, {1: RuntimeError("a bug")})
    core.add(SubmitRequest("r", [3, 4], params(), 0.0))
    with pytest.raises(RuntimeError, match="a bug"):
        core.step()


def test_torchs_own_message_for_a_host_without_memory_is_known() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        torch.empty(2**50, dtype=torch.uint8)


def test_an_answer_that_memory_does_not_let_settle_fails_and_the_others_live() -> None:
    class StarvedChoice(SlotChoice):
        def settle(self, cache: PagedKVCache, candidates: Sequence[int], positions: Sequence[int], *where: Any) -> None:
            if positions[0] == 9 + 8:  # the second chunk of r1
                raise torch.OutOfMemoryError("no")
            super().settle(cache, candidates, positions, *where)

    model = random_model(ModelConfig(trunk=trunk_config()), seed=4)
    of = params(max_tokens=40, ignore_eos=True, confidence=0.0)
    asked = [SubmitRequest(f"r{i}", list(range(2, 2 + (9 if i == 1 else 3))), of, 0.0) for i in range(3)]
    calm, troubled = (
        play(core_of(model, policy=free_rows(), settling=Settling(6, 1 / 4, 0.0, 8, 4), choice=choice), asked)
        for choice in (SlotChoice, StarvedChoice)
    )
    assert troubled.seen["out_of_memory"] == 1
    assert 0 < len(troubled.tokens["r1"]) < 40
    assert {name: troubled.tokens[name] for name in ("r0", "r2")} == {name: calm.tokens[name] for name in ("r0", "r2")}
