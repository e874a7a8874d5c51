"""Lists of numbers, such as block tables, become tensors that are filled up on the right."""

from __future__ import annotations

import pytest
import torch

from hamburger.engine.device.staged import Staged
from small_models import CPU


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[7]], [[1, 2], [3, 4]], [[], []], [], [[5] * 40, [6] * 3]])
def test_rows_are_filled_up_on_the_right(rows: list[list[int]]) -> None:
    width = max((len(row) for row in rows), default=0)
    table = Staged(CPU).padded(rows, -1)
    assert (table.dtype, table.shape) == (torch.int64, (len(rows), width))
    assert table.tolist() == [row + [-1] * (width - len(row)) for row in rows]
