"""A head for greedy rows, on the compiled kernels: a coarse copy says which outputs to compute (kernels/head.h)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hamburger.model.cpu.library import BLOCK, Kernels, PackedWeight
from hamburger.model.cpu.structs import HeadStruct

_pointer = ctypes.c_void_p


class PackedHead:
    """A head in 8 bits, its copy in 4 bits, and how far each output of that is off."""

    def __init__(self, kernels: Kernels, packed: PackedWeight, weight: Tensor) -> None:
        """packed: of weight [outputs, inputs], in 8 bits."""
        self._packed = packed
        self._coarse = PackedWeight(kernels, weight, None, 4)
        self.errors = torch.zeros(-(-packed.outputs // BLOCK) * BLOCK)
        self.struct = HeadStruct(packed.struct, self._coarse.struct, self.errors.data_ptr())
        kernels.function("head_errors", _pointer, _pointer)(ctypes.byref(self.struct), self.errors.data_ptr())
