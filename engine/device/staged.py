"""Staged: lists of a step's numbers become tensors, which go to the device in one piece."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hamburger.model.device.transfer import Staging


class Staged(Staging):
    """A Staging that takes lists."""

    def ints(self, values: list[int]) -> Tensor:
        return self.put(values, torch.int64)

    def floats(self, values: list[float]) -> Tensor:
        return self.put(values, torch.float32)

    def padded(self, rows: list[list[int]], fill: int) -> Tensor:
        """int64 [len(rows), longest], right-padded with `fill`."""
        lengths = [*map(len, rows)]
        width, number = max(lengths, default=0), sum(lengths)
        values = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=number)
        if number < len(rows) * width:
            table = np.full((len(rows), width), fill)
            table[np.arange(width) < np.array(lengths)[:, None]] = values
        else:
            table = values.reshape(len(rows), width)
        return self.put(table, torch.int64)
