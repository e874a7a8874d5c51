"""Block tables of many sequences are filled up in another way than those of a few: the same tables."""

from __future__ import annotations

import pytest

from hamburger.engine.device import staged
from hamburger.model.config import ModelConfig
from small_models import core_of, graft_config, params, random_model, run_core, trunk_config


def test_large_tables_are_filled_up_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(trunk=trunk_config(), graft=graft_config())
    prompts = {str(i): ([5 + i] * (1 + 7 * i), params(max_tokens=12, confidence=0.3)) for i in range(6)}
    found = []
    for largest in (staged._LARGE_TABLE, 0):
        monkeypatch.setattr(staged, "_LARGE_TABLE", largest)
        found.append(run_core(core_of(random_model(config, seed=3)), prompts))
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[7]], [[], []], []])
def test_rows_are_filled_up_on_the_right(rows: list[list[int]]) -> None:
    width = max((len(row) for row in rows), default=0)
    table = staged._filled_up(rows, width, -1)
    assert table.tolist() == [row + [-1] * (width - len(row)) for row in rows]
