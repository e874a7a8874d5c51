"""Steps launched ahead on a real model (float32): the groups, and so the texts, of the plain order."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import get_args

import pytest
import torch

from hamburger.engine.build import _overlaps
from hamburger.engine.core.batch import BatchResult
from hamburger.engine.device.running_step import RunningStep
from hamburger.engine.types.config import EngineArgs, OverlapSteps
from hamburger.engine.types.messages import GroupOutput, SubmitRequest
from hamburger.model.assemble import assemble
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import GraftConfig, ModelConfig
from hamburger.model.cpu.library import load_kernels
from hamburger.model.execution import Execution
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rope_scaling import DynamicRopeScaling
from hamburger.model.steps import EagerSteps
from playing import play
from slow_cases import slow_but
from small_models import CPU, core_of, graft_config, params, random_model, random_tensors, trunk_config

CONTEXT = 64
CONFIDENCES = (0.0, 0.3, 0.5, 0.8, 1.0)
MODELS: dict[str, tuple[Mapping[str, object], GraftConfig | None]] = {
    "hamburger": ({}, graft_config()),
    "fused features, short list": ({}, graft_config(features="fused", micro_norm=True, short_list_size=40)),
    "plain base": ({}, None),
    "dynamic rope": (
        {"max_position_embeddings": 32, "rope_scaling": DynamicRopeScaling(factor=4.0)},
        graft_config(),
    ),
}


def requests(seed: int, confidence: float | None) -> list[SubmitRequest]:
    """Greedy and sampled, long and short, alike and different; a few need the host between two steps."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(2, 96) for _ in range(16)] for _ in range(2)]
    asked = []
    for i in range(14):
        prompt = draw.choice(beginnings)[: draw.randint(1, 16)]
        prompt += [draw.randrange(2, 96) for _ in range(draw.randint(1, 8))]
        sampling = params(
            confidence=draw.choice(CONFIDENCES) if confidence is None else confidence,
            temperature=draw.choice([0.0, 0.8]),
            top_p=draw.choice([1.0, 0.9]),
            seed=i,
            max_tokens=draw.randint(1, CONTEXT - len(prompt)),
            ignore_eos=draw.random() < 0.7,
            logprobs=draw.choice([None, 2]),
            repetition_penalty=1.2 if i == 12 else 1.0,
            prompt_logprobs=1 if i == 13 else None,
        )
        asked.append(SubmitRequest(str(i), prompt, sampling, 0.0, priority=draw.choice([0, 0, 1])))
    return asked


def assert_same(found: dict[str, list[GroupOutput]], wanted: dict[str, list[GroupOutput]]) -> None:
    for name, outputs in wanted.items():
        assert [o.token_ids for o in found[name]] == [o.token_ids for o in outputs], name
        for mine, other in zip(found[name], outputs, strict=True):
            assert (mine.finish_reason, mine.stop_token_id) == (other.finish_reason, other.stop_token_id)
            assert mine.stop_probs == pytest.approx(other.stop_probs, abs=1e-4)
            assert logprobs_of(mine) == pytest.approx(logprobs_of(other), abs=1e-3)


def logprobs_of(output: GroupOutput) -> list[float]:
    entries = [*(output.logprobs or []), *(entry for entry in output.prompt_logprobs or [] if entry is not None)]
    return [value for entry in entries for value in (entry.logprob, *(p for _, p in entry.top))]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("confidence", slow_but([None], [None, 0.0]))
def test_texts_and_log_probabilities_are_those_of_the_plain_order(name: str, confidence: float | None) -> None:
    trunk, graft = MODELS[name]
    config = ModelConfig(trunk=trunk_config(**trunk), graft=graft)
    model = assemble(config, random_tensors(config, 5), dtype=torch.float32, device=CPU, max_positions=CONTEXT)
    asked = requests(12, confidence)
    plain = play(core_of(model, num_blocks=400, max_model_len=CONTEXT), asked).outputs
    for num_blocks, prefix_cache in ((400, False), (2 * CONTEXT // 4, name != "dynamic rope")):
        small = {"num_blocks": num_blocks, "prefix_cache": prefix_cache, "max_model_len": CONTEXT}
        core = core_of(model, max_num_seqs=8, max_num_batched_slots=20, overlap=True, **small)  # type: ignore[arg-type]
        found = play(core, asked)
        assert_same(found.outputs, plain)
        assert found.seen["preemptions"] > 0


def test_texts_stay_on_the_compiled_kernels() -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("this processor, or the package was built without a compiler")
    wide = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    config = ModelConfig(trunk=trunk_config(**wide), graft=graft_config())
    model = assemble(
        config,
        random_tensors(config, 5),
        dtype=torch.float32,
        device=CPU,
        max_positions=CONTEXT,
        execution=Execution(kernels=kernels),
    )
    # At 0.99 most steps have groups of one token only, in a batch with room for more.
    for confidence in (0.5, 0.99):
        asked = requests(12, confidence)[:8]
        plain = play(core_of(model, max_model_len=CONTEXT), asked).outputs
        found = play(core_of(model, max_model_len=CONTEXT, overlap=True), asked).outputs
        assert {name: [o.token_ids for o in outputs] for name, outputs in found.items()} == {
            name: [o.token_ids for o in outputs] for name, outputs in plain.items()
        }


def test_the_next_step_is_given_to_the_model_before_the_result_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()), seed=5)
    happened: list[str] = []
    step, result = EagerSteps.step, RunningStep.result

    def stepped(self: EagerSteps, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        happened.append("step")
        return step(self, batch, cache)

    def resulted(self: RunningStep) -> BatchResult:
        happened.append("result")
        return result(self)

    monkeypatch.setattr(EagerSteps, "step", stepped)
    monkeypatch.setattr(RunningStep, "result", resulted)
    core = core_of(model, overlap=True)
    core.add(SubmitRequest("a", [5, 6, 7], params(confidence=0.0, max_tokens=12, ignore_eos=True), 0.0))
    while core.has_work:
        core.step()
    # Three groups of four tokens; before each result but the last the next step was begun, since a group of one token
    # is possible.
    assert happened == ["step", "step", "result", "step", "result", "step", "result"]


def test_steps_overlap_where_they_are_asked_to_or_on_a_gpu() -> None:
    chosen = {
        (asked, device): _overlaps(EngineArgs(overlap_steps=asked), torch.device(device))
        for asked in get_args(OverlapSteps)
        for device in ("cpu", "cuda")
    }
    assert [key for key, overlaps in chosen.items() if overlaps] == [("auto", "cuda"), ("on", "cpu"), ("on", "cuda")]
