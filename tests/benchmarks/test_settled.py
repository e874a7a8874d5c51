"""What benchmarks/settled.py reports of two engines."""

from __future__ import annotations

from typing import Any

import pytest

import settled
from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.settling import Settling
from hamburger.model.config import ModelConfig
from settled import SMALL, WHOLE
from small_models import core_of, random_model, trunk_config
from verified import free_rows

SETTLING = Settling(window=32, keep=1 / 4, growth=0.0, chunk=32, apart=32)
PROMPTS = [[2, 3, 4], [5, 6, 7, 8]]


def core(name: str, num_blocks: int = 400) -> EngineCore:
    model = random_model(ModelConfig(trunk=trunk_config(max_position_embeddings=700)))
    limits: dict[str, Any] = {"num_blocks": num_blocks, "max_model_len": 700, "block_size": 4}
    return core_of(model, **limits, policy=free_rows(0), settling=SETTLING if name == SMALL else None)


def test_rows_by_answer_length_hold_times_and_slots(capsys: pytest.CaptureFixture[str]) -> None:
    cores = {name: core(name) for name in (WHOLE, SMALL)}
    first, second = settled.grow(cores, PROMPTS, 500, 64)
    assert (first["answer_tokens"], second["answer_tokens"], first["streams"]) == (256, 512, 2)
    assert first["whole_slots"] < second["whole_slots"]
    assert second["small_slots"] < second["whole_slots"] / 2
    assert min(first["whole_ms"], first["small_ms"], first["ratio"]) > 0
    assert not any(one.has_work for one in cores.values())
    shown = settled.table([first, second]).splitlines()
    assert len(shown) == 4
    assert shown[2].startswith("| 2 | 256 | ")


def test_as_many_answers_as_a_pool_holds_without_a_preemption() -> None:
    asked = [[2, 3, 4, 5]] * 8
    # Of 4 and 60 tokens in blocks of 4: 16 blocks each; of those that settle less at the end.
    assert settled.answers_held(core(WHOLE, num_blocks=5 * 16 + 100), asked, 60) == 8
    assert settled.answers_held(core(WHOLE, num_blocks=5 * 36), asked, 140) == 5
    assert settled.answers_held(core(SMALL, num_blocks=5 * 36), asked, 140) == 8
