"""What the start of an engine tells of the graphs that it captures, and which groups it makes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from hamburger.engine import sizing
from hamburger.engine.build import build_core, tell_captures
from hamburger.engine.core.pool import lora_bytes
from hamburger.engine.device import load
from hamburger.engine.device.load import groups_of
from hamburger.engine.device.memory import decode_graphs
from hamburger.engine.drafting.costs import MeasuredCosts, StepCosts
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.sizing import captures_steps
from hamburger.engine.types.config import EngineArgs, OverlapSteps, Quantization
from hamburger.engine.types.messages import Groups
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.kv_cache import PagedKVCache
from native_models import WIDE
from small_models import CPU, graft_config, random_model, random_tensors, trunk_config
from trunk_shapes import QWEN3_MOE


def test_a_start_tells_of_each_quarter_of_its_graphs() -> None:
    args = EngineArgs(max_num_seqs=32, block_size=4)
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()), static_shapes=True)
    cache = PagedKVCache(model.config.trunk, 8, 4, model.state_dtype, CPU)
    told: list[str] = []
    decode_graphs(model, cache, args, "composed", 16).prepare(
        lambda done, total: tell_captures(told.append, done, total)
    )
    assert told == [f"capturing CUDA graphs: {done} of 7 batch sizes" for done in (0, 2, 4, 6)]


@pytest.mark.parametrize(
    ("changes", "device", "attention", "captures"),
    [
        ({}, "cuda", "triton", True),
        ({}, "cuda", "torch", False),
        ({}, "cpu", "triton", False),
        (QWEN3_MOE, "cuda", "triton", False),
    ],
)
def test_steps_are_captured_where_numbers_do_not_decide_what_runs(
    changes: dict[str, Any], device: str, attention: str, captures: bool
) -> None:
    checkpoint = SimpleNamespace(config=ModelConfig(trunk=trunk_config(**changes)))
    resolved: Any = SimpleNamespace(device=torch.device(device), attention=attention, checkpoint=checkpoint)
    assert captures_steps(EngineArgs(), resolved) == captures
    assert not captures_steps(EngineArgs(enforce_eager=True), resolved)


PLAIN = ModelConfig(trunk=trunk_config())
COMPOSED = ModelConfig(trunk=trunk_config(), graft=graft_config())
VERIFIED = replace(COMPOSED, graft=graft_config(groups="verified"))


def test_groups_are_what_is_asked_or_what_the_checkpoint_says() -> None:
    for overlap_steps in get_args(OverlapSteps):
        if overlap_steps == "on":
            continue
        args = EngineArgs(overlap_steps=overlap_steps)
        assert [groups_of(args, config) for config in (PLAIN, COMPOSED, VERIFIED)] == [
            "verified",
            "composed",
            "verified",
        ]
        for groups in get_args(Groups):
            asked = replace(args, groups=groups)
            assert [groups_of(asked, config) for config in (PLAIN, COMPOSED, VERIFIED)] == [groups] * 3


@pytest.mark.parametrize(("groups", "bits"), [("verified", 4), ("composed", 8)])
def test_what_is_only_drafted_is_made_of_coarser_weights(
    groups: Groups, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, COMPOSED, random_tensors(COMPOSED))
    asked: list[Execution] = []
    monkeypatch.setattr(load, "assemble", lambda *_, execution, **__: asked.append(execution))
    args = EngineArgs(model=str(tmp_path), groups=groups, device="cpu")
    load.steps_of(load.resolve(args), args)
    assert [execution.draft_bits for execution in asked] == [bits]


@pytest.mark.parametrize(("quantization", "number_bytes"), [("none", 4), ("int8", None)])
def test_a_pool_leaves_room_for_the_adapters_that_may_come(
    quantization: Quantization, number_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(trunk=trunk_config(**WIDE))
    save_checkpoint(tmp_path, config, random_tensors(config))
    kept: list[int] = []

    def pool(args: EngineArgs, device: torch.device, for_steps: int) -> int:
        kept.append(for_steps)
        return 1 << 24

    monkeypatch.setattr(sizing, "rank_pool_bytes", pool)
    for max_loras in (0, 3):
        args = EngineArgs(
            model=str(tmp_path), device="cpu", dtype="float32", quantization=quantization, max_loras=max_loras,
            max_lora_rank=5,
        )  # fmt: skip
        resolved = load.resolve(args)
        sizing.engine_config(args, resolved, load.steps_of(resolved, args), None, lambda line: None)
    assert kept == [0, 3 * lora_bytes(config.trunk, 5, number_bytes)]


def test_steps_that_are_to_overlap_verify_nothing() -> None:
    args = EngineArgs(overlap_steps="on")
    assert [groups_of(args, config) for config in (PLAIN, COMPOSED)] == ["composed"] * 2
    assert groups_of(replace(args, groups="composed"), VERIFIED) == "composed"
    with pytest.raises(
        ConfigError, match=r"overlap_steps is on, but groups are verified.*use groups composed, or overlap"
    ):
        groups_of(args, VERIFIED)
    for config, remedy in ((PLAIN, "use overlap_steps auto or off"), (COMPOSED, "use groups composed, or overlap")):
        with pytest.raises(ConfigError, match=remedy):
            groups_of(replace(args, groups="verified"), config)


def test_no_draft_makes_a_step_of_more_rows_than_were_measured() -> None:
    costs = StepCosts(MeasuredCosts((1, 2), (1.0, 1.0), (0.0, 0.0)))
    offered = [Proposal("lookup", [5, 6, 7], [0.9, 0.9, 0.9]), None, Proposal("lookup", [5, 6], [0.95, 0.5])]
    # Beside 20 slots of a prompt, which emits, too.
    for max_rows, chosen in ((None, [3, 0, 2]), (9, [3, 0, 2]), (6, [2, 0, 1]), (4, [0, 0, 1]), (2, [0, 0, 0])):
        policy = DraftPolicy(costs, 0, max_rows=max_rows)
        assert policy.choose(22, 3, offered, [0.0] * 3) == chosen, max_rows


def test_an_engine_says_when_its_answers_settle(tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(**WIDE))
    save_checkpoint(tmp_path, config, random_tensors(config))
    shutil.copy(BUILTIN / "tokenizer.json", tmp_path)
    told: list[str] = []
    args = EngineArgs(model=str(tmp_path), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    _, info = build_core(args)
    assert (info.settles, info.settling) == (False, "")
    _, info = build_core(replace(args, settle=True, settle_keep=0.5, settle_limit=999), told.append)
    assert info.settles
    assert info.settling == "window 192, growth 0.3333, keep 0.5, limit 999"
    assert next(line for line in told if "settle" in line).endswith(f": {info.settling}")


def test_what_slides_settles_where_its_window_holds_every_text(tmp_path: Path) -> None:
    trunk = trunk_config(**WIDE, architecture="mistral", sliding_window=64, sliding_layers=(0, 1, 2, 3))
    save_checkpoint(tmp_path, config := ModelConfig(trunk=trunk), random_tensors(config))
    args = EngineArgs(model=str(tmp_path), device="cpu", dtype="float32", settle=True, max_model_len=64)
    assert load.resolve(args).checkpoint.config.trunk.sliding_layers == ()
    with pytest.raises(ConfigError, match=r"settle is on, but .* turn it off, or set max_model_len to 64 at most\."):
        load.resolve(replace(args, max_model_len=65))
    assert load.resolve(replace(args, max_model_len=65, settle=False)).checkpoint.config.trunk == trunk
    other = replace(trunk, architecture="gemma3_text", local_rope_theta=10_000.0)
    assert (other.slides_beyond, other.for_texts(64)) == (0, other)
