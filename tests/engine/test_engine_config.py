"""EngineArgs and EngineConfig refuse what cannot work, and name the field."""

from __future__ import annotations

import pytest

from fakes import fake_config
from hamburger.engine.types.config import EngineArgs
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


def test_overlap_steps_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="overlap_steps is 'maybe': it must be one of auto, on, off"):
        EngineArgs(overlap_steps="maybe")  # type: ignore[arg-type]


def test_the_pool_must_hold_one_sequence_of_max_model_len() -> None:
    assert fake_config(max_model_len=64, block_size=4, num_blocks=16).total_slots == 64
    with pytest.raises(ConfigError, match="65 tokens, but the KV pool holds 64 slots"):
        fake_config(max_model_len=65, block_size=4, num_blocks=16)
