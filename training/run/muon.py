"""Muon, computed in what the device multiplies itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """PyTorch's, whose state and settings it has, but that orthogonalises in `dtype`.

    PyTorch's own does so in bfloat16 always, which a CPU without such instructions emulates: the embedded micro
    decoder's matrices take 40 s there, in float32 .94.

    Only adjust_lr_fn="match_rms_adamw" is known (arXiv 2502.16982, eq. 4).
    """

    def __init__(self, params: list[dict[str, Any]], *, dtype: torch.dtype, weight_decay: float) -> None:
        super().__init__(params, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """closure: no loss is computed anew here."""
        if closure is not None:
            raise ValueError("Muon takes no closure here.")
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._step(matrix, matrix.grad, group)

    def _step(self, matrix: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        rate = group["lr"] * 0.2 * max(matrix.shape) ** 0.5
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(orthogonal(update.to(self._dtype), group), alpha=-rate)


def orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """About U V^T of its singular value decomposition [R, C], by Newton and Schulz's iteration of the fifth order."""
    a, b, c = group["ns_coefficients"]
    is_tall = update.shape[0] > update.shape[1]
    x = update.T if is_tall else update
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
