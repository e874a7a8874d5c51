"""DecodeGraphs with eager replay: the static tensors, buckets and pieces of a GPU, and the texts of the plain way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from captures import CountingCapture
from graph_cores import BLOCK, CONTEXT, MODELS, ROWS, assert_same, graphs_core, requests
from hamburger.engine.device.runner import Runner
from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.config import ModelConfig
from hamburger.model.gpu.availability import AttentionBackend
from hamburger.model.graphs.capture import EagerCapture
from hamburger.model.graphs.decode_graphs import DecodeGraphs, buckets
from hamburger.model.graphs.step_memory import Largest, largest_decode
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.settled_places import SettledPlaces
from playing import play
from slow_cases import slow_but
from small_models import CPU, core_of, params, random_model, trunk_config
from trunk_shapes import QWEN3_MOE


@pytest.mark.parametrize("name", slow_but(["positions", "plain_base"], MODELS))
def test_texts_are_those_of_the_plain_way(name: str) -> None:
    capture = CountingCapture()
    model = random_model(MODELS[name], seed=2, static_shapes=True)
    asked = requests(len(name))
    roomy = play(graphs_core(model, capture, 400), asked, at_once=1, every=3).outputs
    plain = random_model(MODELS[name], seed=2)
    assert_same(
        roomy,
        play(
            core_of(plain, max_num_seqs=ROWS, max_model_len=CONTEXT, num_blocks=400), asked, at_once=1, every=3
        ).outputs,
    )
    assert capture.replayed > 50
    if name != "positions":
        return
    tight = play(
        graphs_core(model, capture, CONTEXT // BLOCK + 4), asked, at_once=1
    ).outputs  # with preemptions and replays
    assert_same(tight, roomy)


def test_a_bucket_is_the_next_larger_one() -> None:
    assert buckets(1) == [1]
    assert buckets(4) == [1, 2, 4]
    assert buckets(11) == [1, 2, 4, 8, 11]
    assert buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_every_bucket_is_captured_once_the_largest_first() -> None:
    model = random_model(MODELS["positions"], static_shapes=True)
    cache = PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU)
    capture, seen = CountingCapture(), []
    graphs = DecodeGraphs(model, cache, capture, max_rows=4, max_columns=8)
    graphs.prepare(lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3)]
    # For each bucket the trunk and 3 micro-steps, and after each a choice of 3 kinds.
    assert capture.captured == 3 * (4 + 4 * 3)
    graphs.prepare()
    assert capture.captured == 3 * (4 + 4 * 3)


def test_only_as_many_micro_steps_are_replayed_as_groups_may_need() -> None:
    model = random_model(MODELS["positions"], seed=2, static_shapes=True)
    for confidence, max_tokens, pieces in (
        (1.0, 2, 4),  # two groups, for each the trunk and a choice
        (0.0, 3, 6),  # one group: the trunk, two micro-steps, three choices
    ):
        capture = CountingCapture()
        core = graphs_core(model, capture, 40)
        core.add(SubmitRequest("r", [5, 6, 7], params(confidence=1.0, max_tokens=1, ignore_eos=True), 0.0))
        core.step()
        assert capture.replayed == 1  # the trunk of a prompt of several slots is not for them, the choice after it is
        capture.replayed = 0
        asked = params(confidence=confidence, max_tokens=max_tokens, ignore_eos=True)
        core.add(SubmitRequest("s", [5], asked, 0.0))
        while core.has_work:
            core.step()
        assert capture.replayed == pieces, (confidence, max_tokens)


def test_rows_that_fill_up_write_into_no_sequences_block() -> None:
    model = random_model(MODELS["positions"], seed=3, static_shapes=True)
    core = graphs_core(model, CountingCapture(), 60, max_rows=8)
    runner = core._runner
    assert isinstance(runner, Runner)
    for i in range(5):  # in a bucket of 8
        core.add(SubmitRequest(str(i), [3 + i, 4], params(ignore_eos=True, max_tokens=9), 0.0))
    while core.has_work:
        core.step()
    for data in runner._cache.data:
        untouched = (data[:60] == 1e4).flatten(1).all(1)
        assert untouched.sum() >= 60 - 5 * 3
        assert (data[60] != 0).any()


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_rows_with_settled_slots_are_replayed_as_they_run(attention: AttentionBackend) -> None:
    """Of three rows and one that fills up; the batch after it has none with settled slots, and says nothing of them."""
    if attention == "triton":
        pytest.importorskip("triton", reason="the package triton is not installed")
    model = random_model(MODELS["plain_base"], seed=2, static_shapes=True, attention=attention)
    places = SettledPlaces(torch.tensor([[1, 0], [3, 2], [0, 0], [1, 1]]), 16, 4)
    mine, other = (PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU, places) for _ in range(2))
    graphs = DecodeGraphs(model, mine, EagerCapture(), max_rows=4, max_columns=8)
    graphs.prepare(only=4)
    for of_mine, of_other in zip(mine.data, other.data, strict=True):
        of_mine.copy_(of_other.normal_(generator=torch.Generator().manual_seed(1)))
    largest = Largest(
        max_slots=32, max_rows=3, max_model_len=CONTEXT, context_slots=24, max_logprobs=2, block_size=BLOCK,
        kv_dtype=torch.float32,
    )  # fmt: skip
    whole = largest_decode(model, largest)
    settled = replace(whole, settled_from=torch.tensor([2, 0, 4]), settled_slots=torch.tensor([16, 0, 12]))
    found = []
    for batch in (settled, whole):
        ours, plain = graphs.step(batch, mine), model.step(batch, other)
        assert torch.equal(ours.token_ids, plain.token_ids)
        assert ours.logprobs is not None
        assert plain.logprobs is not None
        torch.testing.assert_close(ours.logprobs.top, plain.logprobs.top, atol=1e-5, rtol=0)
        found.append(ours.logprobs.top[:, 0])
    with_settled, without = found
    assert not torch.allclose(with_settled, without)


def test_a_model_that_leaves_rows_out_cannot_be_captured() -> None:
    model = random_model(MODELS["positions"])
    cache = PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU)
    with pytest.raises(ValueError, match="whose shapes depend"):
        DecodeGraphs(model, cache, EagerCapture(), max_rows=4, max_columns=8)


def test_a_model_that_chooses_its_experts_cannot_be_captured() -> None:
    model = random_model(ModelConfig(trunk=trunk_config(**QWEN3_MOE)), static_shapes=True)
    cache = PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU)
    with pytest.raises(ValueError, match="whose shapes depend"):
        DecodeGraphs(model, cache, EagerCapture(), max_rows=4, max_columns=8)


def test_another_cache_is_refused() -> None:
    model = random_model(MODELS["positions"], static_shapes=True)
    mine, other = (PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU) for _ in range(2))
    graphs = DecodeGraphs(model, mine, EagerCapture(), max_rows=4, max_columns=8)
    with pytest.raises(ValueError, match="another cache"):
        graphs.step(None, other)  # type: ignore[arg-type]
