"""4-bit weights on CPU: a linear that reads a quarter of the bytes for small batches, and its like for large ones.

A group of 32 weights of a row shares a scale and a zero: w = (code - 8) * scale + zero with codes 0 to 15. GGUF's Q4_0
and Q4_1 are such groups, so a model that comes from them loses nothing but rounding (docs/performance.md). What was
trained on top of it stays apart, as its two low-rank factors: merged, it would no longer fit the grid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hamburger.model.linear import PackedLinear, can_pack

GROUP = 32
_CODES = 16
_ROWS_OF_KERNEL = 16  # it takes output widths that are a multiple of this
_SAMPLED_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Adapted:
    """A linear weight and what was trained on top: W = weight [out, in] + up [out, r] @ down [r, in]; r may be 0."""

    weight: Tensor
    down: Tensor
    up: Tensor

    @staticmethod
    def plain(weight: Tensor) -> Adapted:
        return Adapted(weight, weight.new_zeros(0, weight.shape[1]), weight.new_zeros(weight.shape[0], 0))

    @staticmethod
    def join(parts: Sequence[Adapted]) -> Adapted:
        """One linear that gives the outputs of all parts, of the same input."""
        if len(parts) == 1:
            return parts[0]
        return Adapted(
            torch.cat([part.weight for part in parts]),
            torch.cat([part.down for part in parts]),
            torch.block_diag(*[part.up for part in parts]),
        )


def can_quantize(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch has the kernels, for this dtype and device."""
    return can_pack(dtype, device) and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")


def fits(source: Adapted) -> bool:
    """Whether the kernels take it."""
    out_features, in_features = source.weight.shape
    rank = len(source.down)
    whole_groups = in_features % GROUP == 0 and rank % GROUP == 0
    return whole_groups and out_features % _ROWS_OF_KERNEL == 0


def is_on_grid(weight: Tensor) -> bool:
    """Whether groups of the first rows have at most 16 values each, as dequantised 4-bit weights do."""
    if weight.shape[1] % GROUP:
        return False
    groups = weight[:_SAMPLED_ROWS].reshape(-1, GROUP).sort(-1).values
    distinct = 1 + (groups[:, 1:] != groups[:, :-1]).sum(-1)
    return bool((distinct <= _CODES).all())


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """[out, in] -> codes int32 [out, in], scales and zeros [out, in / 32] in `dtype`; a group's least and greatest
    value get codes 0 and 15, so what is on such a grid already keeps its codes."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1)
    scales = ((high - low) / (_CODES - 1)).to(dtype)
    zeros = (low + _CODES / 2 * scales.float()).to(dtype)
    # In place from here on: new memory for each of 100 million weights would take most of the time.
    steps = groups - zeros.float()[..., None]
    steps /= scales.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = steps.add_(_CODES / 2).round_().clamp_(0, _CODES - 1).to(torch.int32)
    return codes.flatten(-2), scales, zeros


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weights [out, in], float32, that quantize's result stands for."""
    groups = codes.unflatten(-1, (-1, GROUP)).float().sub_(_CODES / 2)
    weight: Tensor = groups.mul_(scales.float()[..., None]).add_(zeros.float()[..., None]).flatten(-2)
    return weight


class _Kernel:
    """y = x W^T for one or a few rows, from packed 4-bit weights."""

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        self._codes: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._scales_and_zeros = torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in], contiguous -> [rows, out]."""
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._codes, GROUP, self._scales_and_zeros)
        return y


class Int4Linear(nn.Module):
    """y = x W^T + b for an Adapted W, in 4 bits for up to `max_rows` rows, else by PackedLinear of the same numbers.

    The low-rank factors have 4 bits too: `down` as further outputs of the weight, so that both are one kernel.
    """

    def __init__(self, source: Adapted, bias: Tensor | None, dtype: torch.dtype) -> None:
        """source: one that `fits`."""
        super().__init__()
        self.max_rows = 0
        self._out_features, rank = len(source.weight), len(source.down)
        wide = quantize(torch.cat((source.weight.float(), source.down.float())), dtype)
        self._wide = _Kernel(*wide)
        weight, down = dequantize(*wide).split((self._out_features, rank))
        self._up: _Kernel | None = None
        if rank:
            up = quantize(source.up, dtype)
            self._up = _Kernel(*up)
            weight = weight + dequantize(*up) @ down
        self.bias = None if bias is None else bias.detach().clone()
        self.many = PackedLinear(weight.to(dtype), bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if x.shape[:-1].numel() > self.max_rows:
            many: Tensor = self.many(x)
            return many
        y = self._wide(x.reshape(-1, x.shape[-1]))
        if self._up is not None:
            out = self._out_features
            y = self._up(y[:, out:].contiguous()).add_(y[:, :out])
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], y.shape[-1])


def crossover(linears: Sequence[Int4Linear], inputs: Callable[[int], Sequence[Tensor]]) -> int:
    """Up to how many rows 4 bits are faster on this machine, measured now; 0: never. inputs: rows -> each one's x."""
    best = 0
    for rows in (1, 2, 4, 6, 8, 12, 16):
        times = [float("inf"), float("inf")]  # for 4 bits and not
        with torch.inference_mode():
            given = inputs(rows)
            for _ in range(3):  # in turn, so that a busy machine slows both down
                for kind, max_rows in enumerate((rows, 0)):
                    start = time.perf_counter()
                    for linear, x in zip(linears, given, strict=True):
                        linear.max_rows = max_rows
                        linear(x)
                    times[kind] = min(times[kind], time.perf_counter() - start)
        if times[0] >= times[1]:
            break
        best = rows
    return best
