"""DecodeGraphs on a GPU: real graphs give what the GPU gives without them, and nothing waits between their pieces."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from drafted import assert_same_text, checked, drafted, eager_drafts, never_drafted
from graph_cores import BLOCK, CONTEXT, MODELS, ROWS, ascii_grammars, assert_same, graphs_core, guided, requests
from hamburger.engine.core.core import EngineCore
from hamburger.engine.device.memory import step_bytes
from hamburger.engine.device.runner import Runner
from hamburger.engine.types.config import EngineArgs
from hamburger.model.batch import empty_sampling
from hamburger.model.gpu.availability import AttentionBackend
from hamburger.model.graphs.capture import CudaCapture, EagerCapture
from hamburger.model.graphs.decode_graphs import DecodeGraphs
from hamburger.model.graphs.step_memory import CudaMeter, Largest, largest_decode
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.steps import EagerSteps
from playing import play
from small_models import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
GPU = torch.device("cuda")
BACKENDS: tuple[AttentionBackend, ...] = ("torch", "triton")  # with the second steps are captured where they are served


def model_of(name: str, attention: AttentionBackend) -> EagerSteps:
    if attention == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed")
    return random_model(MODELS[name], seed=2, device=GPU, attention=attention)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_texts_of_the_same_gpu_without_them(name: str, attention: AttentionBackend) -> None:
    model = model_of(name, attention)
    asked = requests(len(name))
    if find_spec("llguidance") is not None:  # gpu.sh runs without it too
        asked = guided(asked)
    with_graphs = play(graphs_core(model, CudaCapture(GPU), 400), asked, at_once=1, every=3).outputs
    core = graphs_core(model, EagerCapture(), 400)
    assert isinstance(core._runner, Runner)
    plain = EngineCore(core.config, Runner(model, core._runner._cache), lambda: 0.0, ascii_grammars())
    assert_same(with_graphs, play(plain, asked, at_once=1, every=3).outputs)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_drafts_as_rows_of_graphs_leave_the_text(name: str, attention: AttentionBackend) -> None:
    model = model_of(name, attention)
    asked = requests(len(name) + 30)
    if find_spec("llguidance") is not None:
        asked = guided(asked, every=4)
    alone = graphs_core(model, CudaCapture(GPU), 400, captured_rows=2 * ROWS, policy=eager_drafts(model))
    wanted = play(alone, never_drafted(asked), at_once=1, every=3).outputs
    core = graphs_core(model, CudaCapture(GPU), 400, captured_rows=2 * ROWS, policy=eager_drafts(model))
    found = play(core, drafted(asked, wanted), at_once=1, every=3).outputs
    assert_same_text(found, wanted)
    seen = checked(found)
    assert min(seen["accepted"], seen["rejected"]) > 20


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("is_verified", [False, True])
def test_a_step_never_waits_for_the_device(is_verified: bool, attention: AttentionBackend) -> None:
    model = model_of("positions", attention)
    cache = PagedKVCache(model.config.trunk, 400, BLOCK, torch.float32, GPU)
    columns = CONTEXT // BLOCK
    graphs = DecodeGraphs(model, cache, CudaCapture(GPU), max_rows=ROWS, max_columns=columns, is_verified=is_verified)
    graphs.prepare()
    largest = Largest(
        max_slots=32, max_rows=5, max_model_len=CONTEXT, context_slots=40, max_logprobs=3, block_size=BLOCK,
        kv_dtype=torch.float32,
        is_verified=is_verified,
    )  # fmt: skip
    special = largest_decode(model, largest)
    for batch in (replace(special, sampling=empty_sampling(5, GPU)), special):
        graphs.step(batch, cache)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graphs.step(batch, cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", BACKENDS)
def test_what_steps_take_is_measured(attention: AttentionBackend) -> None:
    model = model_of("positions", attention)
    free, _ = torch.cuda.mem_get_info(GPU)
    args = EngineArgs(max_num_seqs=ROWS, max_num_batched_slots=64, block_size=BLOCK)
    eager = step_bytes(model, args, "composed", CONTEXT, free, CudaMeter(GPU), kv_dtype=torch.float32, captures=False)
    with_graphs = step_bytes(
        model, args, "composed", CONTEXT, free, CudaMeter(GPU), kv_dtype=torch.float32, captures=True
    )
    assert 0 < eager < with_graphs < free
