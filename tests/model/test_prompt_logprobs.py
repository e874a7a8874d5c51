"""Log-probabilities of prompt tokens: those of transformers on the same weights, however the prompt is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.messages import GroupOutput, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.assemble import assemble
from hamburger.model.backend import Heads, TorchBackend
from hamburger.model.config import GraftConfig, ModelConfig
from hamburger.model.emission.scoring import SCORED_ROWS_AT_ONCE
from hamburger.model.steps import EagerSteps
from peer import hugging_face
from small_models import CPU, core_of, graft_config, params, random_model, random_tensors, run_core, trunk_config

MODELS: dict[str, tuple[dict[str, Any], GraftConfig | None]] = {
    "plain": ({}, None),
    "untied": ({"tie_word_embeddings": False}, None),
    "grafted": ({}, graft_config()),
    "last_layer_is_no_feature": ({}, graft_config(feature_layers=(0, 2))),
    "short_list": ({}, graft_config(features="fused", short_list_size=40)),
}


def model_and_peer(name: str) -> tuple[EagerSteps, Any]:
    trunk, graft = MODELS[name]
    config = ModelConfig(trunk=trunk_config(**trunk), graft=graft)
    tensors = random_tensors(config, seed=5)
    model = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=512)
    of_trunk = {n: t for n, t in tensors.items() if n.startswith(("model.", "lm_head."))}
    return model, hugging_face(ModelConfig(trunk=config.trunk), of_trunk)


def peer_logprobs(peer: Any, ids: list[int]) -> Tensor:
    """[len(ids) - 1, V]: row i is about token i + 1."""
    with torch.inference_mode():
        logprobs: Tensor = peer(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return logprobs


def check(peer: Any, prompt: list[int], outputs: list[GroupOutput], k: int) -> None:
    entries = outputs[0].prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    expected = peer_logprobs(peer, prompt)
    for row, token_id, entry in zip(expected, prompt[1:], entries[1:], strict=True):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token_id]).sum())
        best = row.topk(k)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert all(value == entry.logprob for i, value in entry.top if i == token_id)


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@pytest.mark.parametrize("slots_a_step", [1, 7, 64, 512])
@pytest.mark.parametrize("name", MODELS)
def test_prompt_logprobs_equal_transformers(name: str, slots_a_step: int) -> None:
    model, peer = model_and_peer(name)
    prompt = prompt_of(60, seed=slots_a_step)
    asked = params(prompt_logprobs=3, confidence=0.0, max_tokens=9, ignore_eos=True)
    core = core_of(model, max_num_seqs=1, max_num_batched_slots=slots_a_step)
    check(peer, prompt, run_core(core, {"r": (prompt, asked)})["r"], 3)


def test_32_at_once_each_get_their_own_and_the_groups_stay() -> None:
    model, peer = model_and_peer("grafted")
    prompts = {str(i): prompt_of(1 + 3 * i, seed=i) for i in range(32)}

    def ask(k: int | None, i: int) -> SamplingParams:
        return params(prompt_logprobs=k, max_tokens=12, confidence=0.2 * (i % 6))

    answers = run_core(core_of(model), {r: (p, ask(int(r) % 4, int(r))) for r, p in prompts.items()})
    unasked = run_core(core_of(model), {r: (p, ask(None, int(r))) for r, p in prompts.items()})
    for r, prompt in prompts.items():
        check(peer, prompt, answers[r], int(r) % 4)
        assert [output.token_ids for output in answers[r]] == [output.token_ids for output in unasked[r]]
        assert all(output.prompt_logprobs is None for output in unasked[r])


def test_max_tokens_0_scores_and_emits_nothing() -> None:
    model, peer = model_and_peer("grafted")
    prompts = {str(i): prompt_of(n, seed=i) for i, n in enumerate((1, 2, 33, 90))}
    asked = params(prompt_logprobs=1, max_tokens=0)
    for r, outputs in run_core(core_of(model, max_model_len=90), {r: (p, asked) for r, p in prompts.items()}).items():
        [output] = outputs
        assert (output.token_ids, output.finish_reason) == ([], "length")
        check(peer, prompts[r], outputs, 1)


def head_rows(model: EagerSteps, core: EngineCore, prompt: list[int], asked: SamplingParams) -> list[int]:
    """The rows of each call of the head."""
    backend = model.backend
    assert isinstance(backend, TorchBackend)
    heads, rows = backend.heads, list[int]()

    def counted(states: Tensor) -> Tensor:
        rows.append(len(states))
        return heads.first(states)

    backend.heads = Heads(counted, heads.micro)
    run_core(core, {"r": (prompt, asked)})
    backend.heads = heads
    return rows


def test_logits_of_a_long_prompt_are_never_held_at_once_and_unasked_ones_not_made() -> None:
    model = random_model(ModelConfig(trunk=trunk_config()), packed=False)
    core = core_of(model, max_num_seqs=1, max_num_batched_slots=512, max_model_len=512)
    prompt = prompt_of(400, seed=1)
    rows = head_rows(model, core, prompt, params(prompt_logprobs=1, max_tokens=1))
    assert max(rows) <= SCORED_ROWS_AT_ONCE <= 256
    assert sum(rows) == 399 + 1
    assert head_rows(model, core, prompt, params(logprobs=1, max_tokens=1)) == [1]
    assert sum(head_rows(model, core, prompt, params(prompt_logprobs=1, max_tokens=0))) == 399


def test_a_prompt_that_is_preempted_while_it_is_scored_loses_nothing() -> None:
    model, peer = model_and_peer("grafted")
    core = core_of(model, num_blocks=5, block_size=4, max_num_seqs=2, max_num_batched_slots=2, max_model_len=20)
    prompts = {"a": prompt_of(3, seed=1), "b": prompt_of(12, seed=2)}
    asked = params(prompt_logprobs=2, max_tokens=8, ignore_eos=True, confidence=1.0)
    for r, prompt in prompts.items():
        core.add(SubmitRequest(r, prompt, asked, 0.0))
    outputs: dict[str, list[GroupOutput]] = {"a": [], "b": []}
    preempted_amid = 0
    while core.has_work:
        step = core.step()
        preempted_amid += bool(step.stats and step.stats.num_preemptions and not outputs["b"])
        for output in step.outputs:
            outputs[output.request_id].append(output)
    assert preempted_amid
    for r, prompt in prompts.items():
        check(peer, prompt, outputs[r], 2)
