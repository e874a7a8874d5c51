"""The largest steps are the largest, and what they and the graphs take is what the meter reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hamburger.engine.device.memory import decode_graphs, decode_rows, step_bytes
from hamburger.engine.types.config import EngineArgs
from hamburger.model.batch import ForwardBatch
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.graphs.step_memory import (
    Largest,
    graph_bytes,
    largest_decode,
    largest_prefill,
    peak_bytes,
    small_cache,
)
from hamburger.model.kv_cache import slot_bytes
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.steps import EagerSteps
from slow_cases import slow_but
from small_models import graft_config, random_model, trunk_config
from trunk_shapes import SHAPES as TRUNKS

MODELS = {
    "grafted": ModelConfig(trunk=trunk_config(), graft=graft_config()),
    "plain_base": ModelConfig(trunk=trunk_config()),
    "dynamic_rope": ModelConfig(trunk=trunk_config(**TRUNKS["dynamic_rope"]), graft=graft_config()),
}


class ScriptedMeter:
    """Reads what it was told, and remembers what was asked."""

    def __init__(self, peaks: list[int], used: list[int]) -> None:
        self.peaks, self.useds, self.asked = peaks, used, list[str]()

    def begin(self) -> None:
        self.asked.append("begin")

    def peak(self) -> int:
        self.asked.append("peak")
        return self.peaks.pop(0)

    def used(self) -> int:
        self.asked.append("used")
        return self.useds.pop(0)


def largest(**changes: Any) -> Largest:
    fields: dict[str, Any] = {
        "max_slots": 50,
        "max_rows": 6,
        "max_model_len": 40,
        "context_slots": 30,
        "max_logprobs": 20,
    }
    return Largest(**{**fields, "block_size": 4, "kv_dtype": torch.float32, **changes})


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_largest_steps_run_on_the_small_cache(name: str, static_shapes: bool, is_verified: bool) -> None:
    model = random_model(MODELS[name], static_shapes=static_shapes)
    meter = ScriptedMeter([7, 5], [])
    assert peak_bytes(model, largest(is_verified=is_verified), meter) == 7
    assert meter.asked == ["begin", "peak"] * 2
    cache = small_cache(model, 50, 4, torch.float32)
    assert cache.scratch_block * 4 == 52
    decode = model.step(largest_decode(model, largest(is_verified=is_verified)), cache)
    assert decode.token_ids.shape == (6, model.config.max_group)
    assert len(decode.group_sizes) == 6
    assert decode.logprobs is not None
    assert torch.isfinite(decode.logprobs.chosen).all()


@pytest.mark.parametrize("step", slow_but([largest_decode], [largest_decode, largest_prefill]))
def test_the_kernels_read_every_row_s_own_table(step: Callable[[EagerSteps, Largest], ForwardBatch]) -> None:
    """All rows of a largest step read the same blocks: so equal rows must come out of it, and the plain ones."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    models = [random_model(MODELS["grafted"], static_shapes=True, attention=b) for b in ("torch", "triton")]
    outputs = []
    for model in models:
        cache = small_cache(model, 50, 4, torch.float32)
        for layer, data in enumerate(cache.data):
            data.copy_(torch.randn(data.shape, generator=torch.Generator().manual_seed(layer)))
        outputs.append(model.step(step(model, largest()), cache))
    plain, ours = outputs
    assert torch.equal(plain.token_ids, ours.token_ids)
    for a, b in ((plain.logprobs, ours.logprobs), (plain.prompt_logprobs, ours.prompt_logprobs)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a.chosen, b.chosen, atol=1e-4, rtol=0)


def test_they_are_as_large_as_steps_can_be() -> None:
    model = random_model(MODELS["grafted"])
    prefill = largest_prefill(model, largest())
    assert prefill.query_slots == [40, 10]
    assert prefill.context_slots_host == [40, 40]
    assert prefill.token_ids.shape == (50, 4)
    assert prefill.scored is not None
    assert len(prefill.scored.rows) == 50
    assert len({*prefill.write_slots.tolist()}) == 50
    lonely = largest_prefill(model, largest(max_slots=41))
    assert (lonely.query_slots, lonely.num_single, lonely.emit.tolist()) == ([1, 40], 1, [0, 40])
    decode = largest_decode(model, largest())
    assert (decode.max_group_limit, decode.num_single, decode.context_slots_host) == (4, 6, [30] * 6)
    assert decode.sampling.adjustments is not None
    assert largest_decode(model, largest(context_slots=10**9)).context_slots_host == [40] * 6
    assert decode.settled_slots is None


def test_they_see_places_that_are_lent() -> None:
    model, places = random_model(MODELS["grafted"]), SettledPlaces(torch.tensor([[0, 3]] * 2 + [[0, 1]] * 2), 16, 4)
    changes = {"settled": places, "is_verified": True}
    decode, prefill = (step(model, largest(**changes)) for step in (largest_decode, largest_prefill))
    assert decode.settled_slots is not None
    assert decode.settled_slots.tolist() == [28] * 6
    assert prefill.settled_slots is not None
    assert prefill.settled_slots.tolist() == [0, 28]
    assert peak_bytes(model, largest(**changes), ScriptedMeter([7, 5], [])) == 7
    static, args = model_and_args()
    cache = small_cache(static, 50, 4, torch.float32, places)
    assert cache.lends
    decode_graphs(static, cache, args, "verified", 40).prepare(only=22)


def test_with_verified_groups_a_slot_has_one_token_and_every_row_may_draft() -> None:
    model = random_model(MODELS["grafted"])
    prefill, decode = (step(model, largest(is_verified=True)) for step in (largest_prefill, largest_decode))
    assert (prefill.token_ids.shape, prefill.max_group_size) == ((50, 1), 1)
    assert (decode.token_ids.shape, decode.max_group_limit) == ((6, 1), 4)
    assert decode.checks is not None
    assert decode.checks.tolist() == [-1] * 6


def test_the_largest_decoding_step_has_a_draft_for_each_sequence_or_one_group() -> None:
    def rows(**changes: int) -> tuple[int, int]:
        args = EngineArgs(**{"max_num_seqs": 11, "max_num_batched_slots": 40, **changes})  # type: ignore[arg-type]
        return decode_rows(args, "composed"), decode_rows(args, "verified")

    assert rows() == (11, 22)
    assert rows(max_num_seqs=1) == (1, 8)
    assert rows(max_num_seqs=30) == (30, 40)
    model, args = model_and_args()
    # Buckets of 1, 2, 4, 8 and 16 beside 22.
    meter = ScriptedMeter([7, 5], [100, 170, 172])
    assert (
        step_bytes(model, args, "verified", 40, 10**6, meter, kv_dtype=torch.float32, captures=True) == 7 + 70 + 2 * 5
    )


def model_and_args(**changes: int | bool) -> tuple[EagerSteps, EngineArgs]:
    fields = {"max_num_seqs": 11, "max_num_batched_slots": 40, "block_size": 4}
    return random_model(MODELS["grafted"], static_shapes=True), EngineArgs(**{**fields, **changes})  # type: ignore[arg-type]


def test_graphs_count_as_the_largest_and_for_each_other_bucket_the_second() -> None:
    model, args = model_and_args()
    cache = small_cache(model, 50, 4, torch.float32)
    meter = ScriptedMeter([], [100, 170, 172])
    assert (
        graph_bytes(lambda: decode_graphs(model, cache, args, "composed", 40), 11, meter) == 70 + 2 * 4
    )  # 1, 2, 4, 8 beside 11
    assert graph_bytes(lambda: decode_graphs(model, cache, args, "composed", 40), 1, ScriptedMeter([], [5, 9])) == 4


class FailingMeter(ScriptedMeter):
    def __init__(self, error: Exception) -> None:
        super().__init__([], [])
        self._error = error

    def peak(self) -> int:
        raise self._error


def test_steps_and_graphs_are_kept_free_of_the_pool() -> None:
    model, args = model_and_args()
    free = 100 * slot_bytes(model.config.trunk, torch.float32)
    assert (
        step_bytes(
            model,
            args,
            "composed",
            40,
            free,
            ScriptedMeter([7, 5], [100, 170, 172]),
            kv_dtype=torch.float32,
            captures=True,
        )
        == 7 + 78
    )
    assert (
        step_bytes(model, args, "composed", 40, free, ScriptedMeter([7, 5], []), kv_dtype=torch.float32, captures=False)
        == 7
    )


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nmore"), RuntimeError("CUDA error: out of memory.\nmore")]
)
def test_steps_that_do_not_fit_beside_the_weights_are_an_error_that_says_so(error: Exception) -> None:
    model, args = model_and_args()
    with pytest.raises(ConfigError, match=r"slots is 40 and max_num_seqs 11.*lower them.*of memory\.\)"):
        step_bytes(model, args, "composed", 40, 10**6, FailingMeter(error), kv_dtype=torch.float32, captures=True)


def test_other_errors_of_a_first_step_stay_what_they_are() -> None:
    model, args = model_and_args()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        step_bytes(
            model,
            args,
            "composed",
            40,
            10**6,
            FailingMeter(RuntimeError("an illegal memory access")),
            kv_dtype=torch.float32,
            captures=True,
        )
