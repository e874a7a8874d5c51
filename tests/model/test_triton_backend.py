"""Whole models on the Triton kernels against the plain ones: prefill in chunks, decoding, groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from drafted import assert_same_text, checked, drafted, drafting_core, eager_drafts, never_drafted
from exactness import answer, numbers
from graph_cores import CONTEXT, MODELS, assert_same, graphs_core, requests
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.settling import Settling
from hamburger.model.assemble import assemble
from hamburger.model.batch import ForwardBatch, Reads, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.gpu.availability import AttentionBackend
from hamburger.model.gpu.backend import TritonBackend
from hamburger.model.graphs.capture import EagerCapture
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rope_scaling import DynamicRopeScaling
from hamburger.model.steps import EagerSteps
from lora_folders import lora_folder
from playing import play
from same_groups import assert_same_groups
from slow_cases import slow_but
from small_models import CPU, core_of, grafted, params, random_tensors, run_core, tokens_of, trunk_config
from trunk_shapes import GEMMA3, OLMO2, QWEN3, QWEN3_MOE, YARN
from verified import free_rows

# (changes to the trunk, to the graft): two layers, so that the interpreter is done in seconds.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "positions": ({}, {"micro_norm": True}),
    "fused": (
        {**QWEN3, "num_heads": 3, "num_kv_heads": 1, "rope_scaling": YARN, "sliding_window": 4, "sliding_layers": (1,)},
        {"features": "fused", "short_list_size": 40},
    ),
    "dynamic": (
        {
            "rope_scaling": DynamicRopeScaling(factor=16.0),
            "max_position_embeddings": 8,
            "qkv_bias": True,
            "o_bias": True,
        },
        {"features": "fused", "feature_layers": (1,)},
    ),
    "merge_adapter": ({}, {"adapter_rank": 32}),
    "olmo2": (OLMO2, {"features": "fused", "micro_norm": True}),
    "gemma3": ({**GEMMA3, "sliding_window": 4, "sliding_layers": (1,)}, {}),
    "unturned": ({"unturned_layers": (0,)}, {}),
}


def config_of(shape: str) -> ModelConfig:
    trunk, graft = SHAPES[shape]
    return grafted(trunk_config(**{"num_layers": 2, **trunk}), **{"feature_layers": (0, 1), **graft})


def model_of(config: ModelConfig, backend: AttentionBackend, device: torch.device, seed: int = 1) -> EagerSteps:
    return assemble(
        config,
        random_tensors(config, seed),
        dtype=torch.float32,
        device=device,
        max_positions=64,
        execution=Execution(packed=False, attention=backend),
    )


def test_experts_answer_as_in_the_plain_model(kernel_device: torch.device) -> None:
    config = ModelConfig(trunk=trunk_config(**QWEN3_MOE, num_layers=2))
    requests = {
        str(n): ([(7 * n + i) % 90 + 2 for i in range(n)], params(max_tokens=4, logprobs=4, ignore_eos=True))
        for n in (1, 5, 11)
    }
    wanted, found = (
        run_core(core_of(model, max_num_seqs=3, max_num_batched_slots=8, max_model_len=64), requests)
        for model in (model_of(config, "torch", CPU), model_of(config, "triton", kernel_device))
    )
    assert_same_groups(found, wanted)


@pytest.mark.parametrize("shape", slow_but(["fused"], SHAPES))
def test_answers_are_those_of_the_plain_model(shape: str, kernel_device: torch.device) -> None:
    config = config_of(shape)
    # One token, a chunk, and a prompt of several chunks; groups of several lengths, of which some end early.
    requests = {
        str(n): ([(7 * n + i) % 90 + 2 for i in range(n)], params(confidence=c, max_tokens=6, logprobs=4))
        for n, c in ((1, 0.0), (5, 0.55), (11, 1.0))
    }
    fused = model_of(config, "triton", kernel_device)
    assert isinstance(fused.backend, TritonBackend)
    wanted, found = (
        run_core(core_of(model, max_num_seqs=3, max_num_batched_slots=8, max_model_len=64), requests)
        for model in (model_of(config, "torch", CPU), fused)
    )
    assert {len(output.token_ids) for outputs in wanted.values() for output in outputs} > {1}
    assert_same_groups(found, wanted)


def test_requests_pass_the_adapters_that_they_name(kernel_device: torch.device, tmp_path: Path) -> None:
    config = config_of("merge_adapter")
    folders = [lora_folder(tmp_path / str(i), config, i) for i in range(2)]
    requests = {
        str(n): ([(7 * n + i) % 90 + 2 for i in range(n)], params(confidence=0.0, max_tokens=6, logprobs=4))
        for n in (1, 5, 11)
    }
    loras = {"1": 1, "11": 2}
    fused, plain = model_of(config, "triton", kernel_device), model_of(config, "torch", CPU)
    small = {"max_num_seqs": 3, "max_num_batched_slots": 8, "max_model_len": 64, "loras": folders}
    wanted, found = (
        run_core(core_of(model, **small), requests, loras=loras)  # type: ignore[arg-type]
        for model in (plain, fused)
    )
    assert_same_groups(found, wanted)
    base = run_core(core_of(plain), requests)
    assert [tokens_of(base[n]) == tokens_of(wanted[n]) for n in requests] == [False, True, False]


@pytest.mark.parametrize("shape", slow_but(["fused"], SHAPES))
def test_drafts_as_rows_give_the_plain_model_s_text(shape: str, kernel_device: torch.device) -> None:
    """Rows of one sequence see each other's keys in one step, beside chunks and other sequences."""
    config = config_of(shape)
    asked = [
        SubmitRequest(
            str(i), [(7 * n + j) % 90 + 2 for j in range(n)],
            params(temperature=t, seed=i, max_tokens=m, logprobs=2, ignore_eos=True), 0.0,
        )
        for i, (n, t, m) in enumerate(((1, 0.0, 14), (5, 0.0, 13), (11, 0.8, 11)))
    ]  # fmt: skip
    small = {"max_num_seqs": 3, "max_num_batched_slots": 12, "max_model_len": 32}
    plain = core_of(model_of(config, "torch", CPU), **small)  # type: ignore[arg-type]
    wanted = play(plain, never_drafted(asked), at_once=1).outputs
    fused = model_of(config, "triton", kernel_device)
    found = play(drafting_core(fused, plain.config), drafted(asked, wanted), at_once=1, every=2).outputs
    assert_same_text(found, wanted)
    seen = checked(found)
    assert min(seen["accepted"], seen["rejected"]) > 3
    assert max(len(output.token_ids) for outputs in found.values() for output in outputs) > 2


def test_places_that_are_lent_are_seen_as_in_the_plain_model(kernel_device: torch.device) -> None:
    """Answers that settle, with drafts as rows, beside others that have not settled yet; and replayed in chunks."""
    config = config_of("positions")
    asked = [
        SubmitRequest(
            str(i),
            [(7 * n + j) % 90 + 2 for j in range(n)],
            params(max_tokens=m, logprobs=2, ignore_eos=True, confidence=0.0),
            0.0,
        )
        for i, (n, m) in enumerate(((5, 20), (2, 22)))
    ]
    shares, outputs = torch.tensor([[0, 3], [0, 1]]), []
    plain, fused = model_of(config, "torch", CPU), model_of(config, "triton", kernel_device)
    for model, of_heads in ((plain, shares), (fused, shares), (plain, None)):
        core = core_of(
            model,
            max_num_seqs=2,
            max_num_batched_slots=12,
            max_model_len=28,
            num_blocks=7,
            policy=free_rows(3),
            settling=Settling(window=4, growth=0.0, keep=1 / 2, chunk=8, apart=4),
            shares=of_heads,
        )
        outputs.append((played := play(core, asked, at_once=1, every=1)).outputs)
        assert played.seen["preemptions"]
    wanted, found, without = outputs
    assert_same_text(found, wanted)
    assert all(mine[-1].dropped_slots for mine in found.values())
    assert checked(found)["accepted"]
    of_wanted, of_without = ([numbers(answer(of[name])) for name in of] for of in (wanted, without))
    assert of_without != [pytest.approx(values, abs=1e-2) for values in of_wanted]


def decoding(contexts: list[int], write: list[int], emit: list[int], device: torch.device) -> ForwardBatch:
    """One slot for each of the sequences, which have two blocks of 4 each; nothing about them is known to the host."""
    n = len(contexts)
    index = torch.arange(n, device=device)
    return ForwardBatch(
        token_ids=index[:, None] + 5,
        group_sizes=torch.ones_like(index),
        max_group_size=1,
        positions=index + 3,
        write_slots=torch.tensor(write, device=device),
        block_tables=torch.stack((2 * index, 2 * index + 1), dim=1),
        context_slots=torch.tensor(contexts, device=device),
        query_slots=[1] * n,
        context_slots_host=[],
        num_single=n,
        emit=torch.tensor(emit, device=device),
        confidence=torch.ones(len(emit), device=device),
        group_limits=torch.ones(len(emit), dtype=torch.int64, device=device),
        max_group_limit=1,
        sampling=empty_sampling(len(emit), device),
    )


def test_rows_of_padding_change_nothing(kernel_device: torch.device) -> None:
    """What a CUDA graph of a larger batch replays: rows without context, whatever their write slots say."""
    model = model_of(config_of("positions"), "triton", kernel_device)
    cache = PagedKVCache(model.config.trunk, 8, 4, torch.float32, kernel_device)
    torch.manual_seed(2)
    for layer in cache.data:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in cache.data]
    contexts, write = [3, 7], [2, 14]
    alone = decoding(contexts, write, [0, 1], kernel_device)
    padded = decoding([*contexts, 0, 0], [*write, 0, -1], [0, 1], kernel_device)
    tokens, states = [], []
    for batch in (alone, padded):
        for layer, old in zip(cache.data, before, strict=True):
            layer.copy_(old)
        tokens.append(model.step(batch, cache).token_ids)
        with torch.inference_mode():
            hidden, features = model.backend.trunk(batch, cache, Reads(batch.emit, 2))
        states.append((hidden, *features))
        for layer, old in zip(cache.data, before, strict=True):
            changed = (layer != old).flatten(0, 1).flatten(1).any(-1).nonzero().squeeze(-1)
            assert changed.tolist() == write
    assert torch.equal(*tokens)
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    finite, _ = model.backend.trunk(padded, cache, Reads(torch.arange(4, device=kernel_device), 0))
    assert finite.isfinite().all()


@pytest.mark.slow
def test_pieces_of_a_step_with_drafts_on_the_kernels_give_the_plain_texts() -> None:
    config = MODELS["short_list"]
    asked = [replace(r, params=replace(r.params, max_tokens=6, min_tokens=0)) for r in requests(3, number=3)]
    plain = model_of(config, "torch", CPU, seed=2)
    core = core_of(plain, max_num_seqs=3, max_model_len=CONTEXT, num_blocks=80)
    wanted = play(core, never_drafted(asked), at_once=1).outputs
    execution = Execution(packed=False, static_shapes=True, attention="triton")
    model = assemble(
        config, random_tensors(config, 2), dtype=torch.float32, device=CPU, max_positions=CONTEXT, execution=execution
    )
    graphs = graphs_core(model, EagerCapture(), 80, max_rows=3, captured_rows=10, policy=eager_drafts(model))
    found = play(graphs, drafted(asked, wanted), at_once=1).outputs
    assert_same_text(found, wanted)
    assert checked(found)["accepted"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["positions", "short_list"])
def test_pieces_of_a_decoding_step_on_the_kernels_give_the_plain_texts(name: str) -> None:
    """What CUDA graphs capture, replayed eagerly: static rows, padding in the scratch block, kernels in between."""
    config = MODELS[name]
    # The interpreter is slow: few tokens each.
    asked = [replace(r, params=replace(r.params, max_tokens=4, min_tokens=0)) for r in requests(3, number=3)]
    tensors = random_tensors(config, 2)
    model = assemble(
        config,
        tensors,
        dtype=torch.float32,
        device=CPU,
        max_positions=CONTEXT,
        execution=Execution(packed=False, static_shapes=True, attention="triton"),
    )
    ours = play(graphs_core(model, EagerCapture(), 80, max_rows=3), asked, at_once=1).outputs
    plain = model_of(config, "torch", CPU, seed=2)
    assert_same(
        ours, play(core_of(plain, max_num_seqs=3, max_model_len=CONTEXT, num_blocks=80), asked, at_once=1).outputs
    )
