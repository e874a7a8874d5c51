"""DecodeGraphs with eager replay: the static tensors, buckets and pieces of a GPU, and the texts of the plain way."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hamburger.engine.config import EngineConfig
from hamburger.engine.core import EngineCore
from hamburger.engine.messages import GroupOutput, SubmitRequest
from hamburger.engine.runner import Runner
from hamburger.model.capture import EagerCapture, Work
from hamburger.model.config import ModelConfig
from hamburger.model.decode_graphs import FORMS, DecodeGraphs, Form, buckets
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from small_models import CPU, core_of, graft_config, params, random_model, trunk_config
from trunk_shapes import SHAPES as TRUNKS

BLOCK, CONTEXT, ROWS = 4, 128, 11
MODELS: dict[str, ModelConfig] = {
    "positions": ModelConfig(trunk=trunk_config(), graft=graft_config()),
    "fused": ModelConfig(trunk=trunk_config(), graft=graft_config(features="fused", micro_norm=True)),
    "short_list": ModelConfig(trunk=trunk_config(), graft=graft_config(features="fused", short_list_size=40)),
    "plain_base": ModelConfig(trunk=trunk_config(tie_word_embeddings=False)),
    "dynamic_rope": ModelConfig(trunk=trunk_config(**TRUNKS["dynamic_rope"]), graft=graft_config()),
    "sliding": ModelConfig(trunk=trunk_config(**TRUNKS["qwen2_sliding"]), graft=graft_config()),
}


class CountingCapture(EagerCapture):
    """Counts what is captured and replayed, and lets nothing in it wait for the device."""

    def __init__(self, *, waits: bool = False) -> None:
        self.captured = self.replayed = 0
        self._waits = waits

    def __call__(self, work: Work) -> Work:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            with NoWaiting():  # type: ignore[no-untyped-call]
                work()

        return replay


class NoWaiting(TorchDispatchMode):
    """Fails on operations whose result's shape, or whose course, depends on the device's numbers."""

    FORBIDDEN = ("nonzero", "_local_scalar_dense", "item", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask picks rows out"
        if name == "repeat_interleave":
            assert not isinstance(args[-1], Tensor), "the shape depends on numbers"
        return func(*args, **(kwargs or {}))


def graphs_core(
    model: HamburgerModel, capture: EagerCapture, form: Form, num_blocks: int, *, max_rows: int = ROWS
) -> EngineCore:
    config = EngineConfig(
        max_model_len=CONTEXT,
        max_num_seqs=max_rows,
        max_num_batched_slots=32,
        block_size=BLOCK,
        num_blocks=num_blocks,
        eos_token_ids=(1,),
        max_group=model.config.max_group,
    )
    cache = PagedKVCache(model.config.trunk, num_blocks, BLOCK, torch.float32, CPU)
    for data in cache.data:  # what nobody has written must not matter
        data[:num_blocks].fill_(1e4)
    graphs = DecodeGraphs(model, cache, capture, max_rows=max_rows, max_columns=CONTEXT // BLOCK, form=form)
    graphs.prepare()
    return EngineCore(config, Runner(model, cache, graphs), clock=lambda: 0.0)


def requests(seed: int, number: int = 14) -> list[SubmitRequest]:
    """Of every kind: greedy, sampled and filtered, penalties, bias, log-probabilities of answers and prompts."""
    draw = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_p": 0.8, "top_k": 30},
        {"temperature": 0.7, "min_p": 0.05},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.3, "temperature": 0.8},
        {"logit_bias": {5: 4.0, 6: -100.0}},
        {"min_tokens": 12, "max_tokens": 20},
        {"logprobs": 3},
        {"logprobs": 0, "temperature": 1.0},
        {"prompt_logprobs": 2},
        {"stop_token_ids": tuple(range(40, 60))},
    ]
    asked = []
    for i in range(number):
        prompt = [draw.randrange(2, 96) for _ in range(draw.randint(1, 30))]
        how = {"confidence": draw.choice([0.0, 0.3, 0.5, 0.8, 1.0]), "max_tokens": draw.randint(10, 40), "seed": i}
        asked.append(SubmitRequest(str(i), prompt, params(**{**how, **draw.choice(kinds)}), 0.0))
    return asked


def play(core: EngineCore, asked: list[SubmitRequest], every: int = 1) -> dict[str, list[GroupOutput]]:
    """One arrives each `every` steps, so that batches grow and shrink."""
    outputs: dict[str, list[GroupOutput]] = {request.request_id: [] for request in asked}
    waiting, step = list(asked), 0
    while waiting or core.has_work:
        if waiting and step % every == 0:
            core.add(waiting.pop(0))
        step += 1
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
        core.check_integrity()
    return outputs


def assert_same(ours: dict[str, list[GroupOutput]], plain: dict[str, list[GroupOutput]]) -> None:
    for request_id, expected in plain.items():
        found = ours[request_id]
        assert [o.token_ids for o in found] == [o.token_ids for o in expected], request_id
        for a, b in zip(found, expected, strict=True):
            assert a.stop_probs == pytest.approx(b.stop_probs, abs=1e-5)
            assert (a.logprobs is None) == (b.logprobs is None)
            for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
                assert [token_id for token_id, _ in x.top] == [token_id for token_id, _ in y.top]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_the_plain_way(name: str, form: Form) -> None:
    if form != "steps" and name not in ("positions", "plain_base"):
        pytest.skip("how pieces follow each other does not depend on the model's shape")
    capture = CountingCapture()
    model = random_model(MODELS[name], seed=2, masked=True)
    asked = requests(len(name))
    roomy = play(graphs_core(model, capture, form, 400), asked, every=3)
    plain = random_model(MODELS[name], seed=2)
    assert_same(roomy, play(core_of(plain, max_num_seqs=ROWS, max_model_len=CONTEXT, num_blocks=400), asked, every=3))
    assert capture.replayed > 50
    if (name, form) != ("positions", "steps"):
        return
    tight = play(graphs_core(model, capture, form, CONTEXT // BLOCK + 4), asked)  # with preemptions and replays
    assert_same(tight, roomy)


def test_a_bucket_is_the_next_larger_one() -> None:
    assert buckets(1) == [1]
    assert buckets(4) == [1, 2, 4]
    assert buckets(11) == [1, 2, 4, 8, 11]
    assert buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_every_bucket_is_captured_once_the_largest_first() -> None:
    model = random_model(MODELS["positions"], masked=True)
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
    model = random_model(MODELS["positions"], seed=2, masked=True)
    for confidence, max_tokens, form, pieces in (
        (1.0, 2, "steps", 4),  # two groups, for each the trunk and a choice
        (0.0, 3, "steps", 6),  # one group: the trunk, two micro-steps, three choices
        (0.0, 3, "whole", 1),
    ):
        capture = CountingCapture()
        core = graphs_core(model, capture, form, 40)  # type: ignore[arg-type]
        core.add(SubmitRequest("r", [5, 6, 7], params(confidence=1.0, max_tokens=1, ignore_eos=True), 0.0))
        core.step()
        assert capture.replayed == 0  # a prompt of several slots is not for them
        asked = params(confidence=confidence, max_tokens=max_tokens, ignore_eos=True)
        core.add(SubmitRequest("s", [5], asked, 0.0))
        while core.has_work:
            core.step()
        assert capture.replayed == pieces, (confidence, max_tokens, form)


def test_rows_that_fill_up_write_into_no_sequences_block() -> None:
    model = random_model(MODELS["positions"], seed=3, masked=True)
    core = graphs_core(model, CountingCapture(), "steps", 60, max_rows=8)
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


def test_a_model_that_leaves_rows_out_cannot_be_captured() -> None:
    model = random_model(MODELS["positions"])
    cache = PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU)
    with pytest.raises(ValueError, match="leaves rows out"):
        DecodeGraphs(model, cache, EagerCapture(), max_rows=4, max_columns=8)


def test_another_cache_is_refused() -> None:
    model = random_model(MODELS["positions"], masked=True)
    mine, other = (PagedKVCache(model.config.trunk, 8, BLOCK, torch.float32, CPU) for _ in range(2))
    graphs = DecodeGraphs(model, mine, EagerCapture(), max_rows=4, max_columns=8)
    with pytest.raises(ValueError, match="another cache"):
        graphs.step(None, other)  # type: ignore[arg-type]
