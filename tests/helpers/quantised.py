"""Numbers for tests of weights in few bits, and how far a product of them is off."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows of very different size, as weights and states have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.logspace(-3, 2, rows)[:, None]
