"""DecodeGraphs with eager replay and verified groups: drafts as rows of a bucket, and the text of none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from captures import CountingCapture, Watched
from drafted import assert_same_text, checked, drafted, eager_drafts, never_drafted
from graph_cores import BLOCK, CONTEXT, MODELS, ROWS, ascii_grammars, graphs_core, guided, requests
from hamburger.engine.device.step_costs import measure_costs
from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.graphs.capture import EagerCapture
from hamburger.model.graphs.decode_graphs import DecodeGraphs
from hamburger.model.graphs.step_memory import Largest, largest_decode
from hamburger.model.kv_cache import PagedKVCache
from playing import play
from slow_cases import slow_but
from small_models import CPU, core_of, params, random_model

BUCKET = 24  # rows of the largest; batches of more run eagerly


@pytest.mark.parametrize("name", slow_but(["positions", "short_list", "plain_base"], MODELS))
def test_texts_are_those_of_confidence_1_without_graphs(name: str) -> None:
    longest = MODELS[name].trunk.max_position_embeddings
    asked = [
        replace(r, params=replace(r.params, max_tokens=min(r.params.max_tokens or 0, longest - len(r.prompt_ids))))
        for r in guided(requests(len(name) + 30, number=36 if longest > 100 else 80), every=4)
    ]
    plain = core_of(
        random_model(MODELS[name], seed=2),
        max_num_seqs=ROWS,
        max_model_len=CONTEXT,
        num_blocks=400,
        grammars=ascii_grammars(),
    )
    wanted = play(plain, never_drafted(asked), at_once=1, every=2).outputs
    model, capture = random_model(MODELS[name], seed=2, static_shapes=True), CountingCapture()
    ours = drafted(asked, wanted)
    for num_blocks in (400, CONTEXT // BLOCK + 4):
        core = graphs_core(model, capture, num_blocks, captured_rows=BUCKET, policy=eager_drafts(model))
        found = play(core, ours, at_once=2)
        assert_same_text(found.outputs, wanted)
        seen = checked(found.outputs)
        assert min(seen["accepted"], seen["rejected"], seen["prediction"]) > 50
        assert (seen["micro"] > 20) == (MODELS[name].graft is not None)
    assert found.seen["preemptions"]
    assert capture.replayed > 30


def test_drafts_are_chosen_in_every_way_that_tokens_are() -> None:
    model = random_model(MODELS["positions"], static_shapes=True)
    cache = PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU)
    capture = CountingCapture()
    graphs = DecodeGraphs(model, cache, capture, max_rows=2, max_columns=8, is_verified=True)
    graphs.prepare()
    # For both buckets the trunk and 3 micro-steps, a choice of 3 kinds after each.
    assert capture.captured == 2 * (4 + 3 * 4)


def test_only_as_many_micro_steps_are_replayed_as_drafts_are_wanted() -> None:
    for confidence, replayed in ((1.0, {"compute": 1, "choose": 1}), (0.0, {"compute": 4, "choose": 4})):
        model, capture = random_model(MODELS["positions"], seed=2, static_shapes=True), Watched()
        core = graphs_core(model, capture, 40, policy=eager_drafts(model))
        asked = params(confidence=confidence, temperature=0.7, max_tokens=30, ignore_eos=True)
        core.add(SubmitRequest("a", [5], asked, 0.0))
        core.step()
        assert capture.replayed == replayed


def test_the_steps_that_are_measured_are_replayed() -> None:
    model, capture = random_model(MODELS["positions"], static_shapes=True), Watched()
    cache = PagedKVCache(model.config.trunk, 64, BLOCK, torch.float32, CPU)
    graphs = DecodeGraphs(model, cache, capture, max_rows=6, max_columns=16, is_verified=True)
    graphs.prepare()
    found = measure_costs(graphs, cache, 6, 64, None)
    assert found.rows == (1, 2, 3, 4, 6)
    assert min(found.steps) > 0
    # At least twice for each number of rows: a trunk twice, and once with 3 micro-steps.
    assert capture.replayed["compute"] >= 2 * 5 * (1 + 1 + 4)


def test_a_batch_of_composed_groups_is_refused_and_the_other_way_round() -> None:
    model = random_model(MODELS["positions"], static_shapes=True)
    cache = PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU)
    for is_verified in (False, True):
        graphs = DecodeGraphs(model, cache, EagerCapture(), max_rows=4, max_columns=8, is_verified=is_verified)
        largest = Largest(
            max_slots=4, max_rows=4, max_model_len=8, context_slots=4, max_logprobs=0, block_size=BLOCK,
            kv_dtype=torch.float32,
            is_verified=not is_verified,
        )  # fmt: skip
        with pytest.raises(ValueError, match="groups of the other kind"):
            graphs.step(largest_decode(model, largest), cache)
