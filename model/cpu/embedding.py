"""CpuEmbedding: tokens of slots to what the trunk reads, on the kernels. model/embedder.py is the plain reference."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hamburger.model.cpu.library import GROUP, Kernels
from hamburger.model.cpu.structs import EmbeddingStruct, MergerStruct
from hamburger.model.cpu.weights import PackedWeight
from hamburger.model.embedder import CompositionalEmbedder
from hamburger.model.linear import weights_of

MAX_GROUP = 64


def merger_fits(plain: CompositionalEmbedder) -> bool:
    """Whether the kernels take its widths."""
    most, half = plain.pos.shape
    return half % GROUP == 0 and most <= MAX_GROUP


class CpuEmbedding:
    """Tokens of slots -> what the trunk reads, in one call: an embedding, or a composed group's (embedder.py)."""

    def __init__(self, kernels: Kernels, table: Tensor, plain: CompositionalEmbedder | None) -> None:
        """table: [V, D]. plain: composes groups; None where no slot has several tokens."""
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        self._kernels, self._table = kernels, table
        self._embedding = EmbeddingStruct.of(table)
        self._run = kernels.function("embed", *4 * (pointer,), int64, int64, *4 * (pointer,))
        self._memory = kernels.function("embed_memory", pointer, int64, int64)
        self._merger = MergerStruct()
        if plain is not None:
            self._pos = plain.pos.detach().float().contiguous()
            linears = (plain.q_proj, plain.k_proj, plain.v_proj, plain.out_proj)
            self._weights = [PackedWeight(kernels, *weights_of(linear), 8) for linear in linears]
            structs = (weight.struct for weight in self._weights)
            self._merger = MergerStruct(*structs, self._pos.data_ptr(), 2 * self._pos.shape[1], plain.heads)

    def __call__(self, token_ids: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T, W], of which sizes [T] count -> states float32 [T, D], and the slots of several, int64 [N]."""
        slots, width = token_ids.shape
        states = torch.empty(slots, self._table.shape[1])
        composed = torch.empty(slots, dtype=torch.int64)
        count = ctypes.c_int64()
        merger = ctypes.byref(self._merger)
        memory = self._kernels.working_memory(self._memory(merger, slots if width > 1 else 0, width))
        tensors = (token_ids, sizes)
        self._run(
            ctypes.byref(self._embedding), merger, *(t.data_ptr() for t in tensors), slots, width,
            states.data_ptr(), composed.data_ptr(), ctypes.byref(count), memory,
        )  # fmt: skip
        return states, composed[: count.value]
