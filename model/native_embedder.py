"""CompositionalEmbedder on the compiled kernels (native.py)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from hamburger.model.embedder import CompositionalEmbedder
from hamburger.model.native import GROUP, Kernels, PackedWeight, WeightStruct

MAX_GROUP = 64


class _Merger(ctypes.Structure):
    _fields_ = (
        *((name, WeightStruct) for name in ("q", "k", "v", "out")),
        ("pos", ctypes.c_void_p),
        ("hidden", ctypes.c_int32),
        ("heads", ctypes.c_int32),
    )


def merger_fits(plain: CompositionalEmbedder) -> bool:
    """Whether the kernels take its widths."""
    most, half = plain.pos.shape
    return half % GROUP == 0 and most <= MAX_GROUP


class NativeEmbedder(CompositionalEmbedder):
    """Groups are merged in one call; states are float32."""

    def __init__(self, kernels: Kernels, plain: CompositionalEmbedder) -> None:
        nn.Module.__init__(self)  # the weights are packed instead
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        self._kernels, self.heads = kernels, plain.heads
        self._run = kernels.function("merge", pointer, pointer, pointer, int64, int64, pointer, pointer)
        self._memory = kernels.function("merge_memory", pointer, int64, int64)
        self._pos = plain.pos.detach().float().contiguous()
        linears = (plain.q_proj, plain.k_proj, plain.v_proj, plain.out_proj)
        self._weights = [PackedWeight(kernels, linear.weight, linear.bias, 8) for linear in linears]
        structs = (weight.struct for weight in self._weights)
        self._merger = _Merger(*structs, self._pos.data_ptr(), 2 * self._pos.shape[1], plain.heads)
        self._reference = ctypes.byref(self._merger)

    def _merge(self, e: Tensor, sizes: Tensor) -> Tensor:
        groups, width, hidden = e.shape
        e, states = e.contiguous(), torch.empty(groups, hidden)
        memory = self._kernels.working_memory(self._memory(self._reference, groups, width))
        self._run(self._reference, e.data_ptr(), sizes.data_ptr(), groups, width, states.data_ptr(), memory)
        return states
