"""EngineArgs and EngineConfig refuse what cannot work, and name the field."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import pytest

from fake_engines import fake_config
from hamburger.engine.core.pool import blocks_of_pool
from hamburger.engine.types.config import ENGINE_SETTINGS, SETTLE_SETTINGS, EngineArgs, LLMSettings
from hamburger.model.config import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_slots", 63),  # below max_num_seqs
        ("kv_cache_memory", 0),
        ("block_size", 0),
        ("confidence", 1.5),
        ("confidence", float("nan")),
        ("max_queue", 0),
        ("max_queue_seconds", 0),
        ("tensor_parallel_size", 0),
    ],
)
def test_bad_arguments_are_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is {value}"):
        EngineArgs(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("quantization", "int4", "use none"),
        ("quantization", "int8", "use none"),
        ("overlap_steps", "on", "use auto"),
        ("device", "cuda:1", "use cuda"),
    ],
)
def test_what_does_not_go_with_ranks(field: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is {value}, but tensor_parallel_size is 2, .*{remedy}"):
        EngineArgs(tensor_parallel_size=2, **{field: value})  # type: ignore[arg-type]


def test_what_type_checkers_see_of_llm_is_what_is_declared() -> None:
    # The model and its base are arguments of their own.
    declared = {
        name: setting.type
        for name, setting in ENGINE_SETTINGS.items()
        if not setting.of_server and name not in ("model", "base")
    }
    assert get_type_hints(LLMSettings) == declared


def test_every_field_but_the_number_of_engines_is_a_setting_with_a_line_of_help() -> None:
    assert EngineArgs.__dataclass_fields__.keys() - ENGINE_SETTINGS.keys() == {"num_engines"}
    assert all(setting.help and setting.name == name for name, setting in ENGINE_SETTINGS.items())


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("max_num_seqs", 1, None),
        ("max_model_len", None, None),
        ("max_num_seqs", 0, "it must be at least 1."),
        ("kv_cache_memory", "4GiB", "it must be a number of bytes."),
        ("max_num_seqs", True, "it must be a number."),
        ("confidence", float("nan"), "it must be in [0, 1]."),
        ("max_queue_seconds", math.inf, None),
        ("max_queue_seconds", float("nan"), "it must be above 0."),
        ("dtype", "int3", "it must be one of auto, bfloat16, float32, float16."),
        ("quantization", None, "it must be one of auto, none, int8, int4."),
        ("block_size", 3.5, "it must be a whole number."),
        ("kv_cache_memory", 4e9, "it must be a whole number of bytes."),
        ("settle_limit", "200", "it must be a number."),
        ("max_queue_seconds", 3, None),
        ("settle", "false", "it must be True or False."),
        ("prefix_cache", 0, "it must be True or False."),
        ("model", 5, "it must be a text."),
        ("device", 0, "it must be a text."),
    ],
)
def test_a_setting_says_what_is_wrong_with_a_value(name: str, value: object, fault: str | None) -> None:
    assert ENGINE_SETTINGS[name].fault(value) == fault


def test_overlap_steps_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="overlap_steps is 'maybe': it must be one of auto, on, off"):
        EngineArgs(overlap_steps="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(SETTLE_SETTINGS))
def test_what_says_how_answers_settle_goes_with_settling(name: str) -> None:
    given: dict[str, Any] = {name: 0.5 if name in ("settle_growth", "settle_keep") else 256}
    with pytest.raises(ConfigError, match=f"{name} is given, but settle is off: turn that on, or leave {name} out"):
        EngineArgs(**given)
    assert getattr(EngineArgs(settle=True, **given), name) == given[name]


def test_what_adapters_keep_of_the_memory_is_told_where_the_pool_lacks_it() -> None:
    room: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "max_num_seqs": None}
    with pytest.raises(
        ConfigError, match="has 0 MiB, beside 8 MiB for max_loras of max_lora_rank: lower these or max_"
    ):
        blocks_of_pool(0, 1024, for_loras=8 << 20, **room)
    with pytest.raises(ConfigError, match="has 0 MiB: lower max_model_len, or raise kv_cache_memory"):
        blocks_of_pool(0, 1024, **room)


def test_the_pool_must_hold_one_sequence_of_max_model_len() -> None:
    assert fake_config(max_model_len=64, block_size=4, num_blocks=16).total_slots == 64
    with pytest.raises(ConfigError, match="65 tokens, but the KV pool holds 64 slots"):
        fake_config(max_model_len=65, block_size=4, num_blocks=16)
