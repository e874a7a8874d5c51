"""Costs and engines for tests of benchmarks/replay.py."""

from __future__ import annotations

import math
from typing import Any

from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.settling import Settling
from simulation.costs import TERMS, CostModel

NOTHING_ELSE = dict.fromkeys(TERMS, 0.0)
# 20 ms a step and 1 ms a row.
BY_ROWS = CostModel((1, 2), (0.021, 0.022), NOTHING_ELSE | {"micro_rows": 0.0002}, {
    "steps": 1, "median_relative_error": 0.0, "p90_relative_error": 0.0, "r_squared": 1.0, "bias": 1.0,
})  # fmt: skip
ONE_SECOND = CostModel((1, 2), (1.0, 1.0), NOTHING_ELSE, {})
SETTLING = Settling(window=64, keep=0.125)


def engine_config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_slots": 512,
        "block_size": 32,
        "num_blocks": 64,
        "eos_token_ids": (),
        "max_group": 4,
        "max_queue_seconds": math.inf,
    }
    return EngineConfig(**(fields | changes))
