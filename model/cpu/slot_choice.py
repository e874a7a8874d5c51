"""SlotChoice by the compiled kernels: a chunk settles in one call, where torch takes some twenty for each layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.structs import SettlingStruct
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rotary import RotaryEmbedding
from hamburger.model.slot_choice import PRECISION, SlotChoice

_pointer = ctypes.c_void_p


class CpuSlotChoice(SlotChoice):
    """As SlotChoice; its rotary tables are float32."""

    def __init__(self, kernels: Kernels, rotary: RotaryEmbedding, probe: Tensor | None = None) -> None:
        super().__init__(rotary, probe)
        self._run = kernels.function("settle", _pointer, ctypes.c_int, _pointer)

    def settle(
        self,
        cache: PagedKVCache,
        candidates: Sequence[int],
        positions: Sequence[int],
        kept_at: Sequence[int],
        moves: Sequence[tuple[int, int]],
    ) -> None:
        moving = torch.tensor(moves).view(-1, 2)
        # What the call may overwrite is read before, and written after what it reads.
        moved = [data.flatten(0, 1)[moving[:, 0]] for data in cache.data] if moves else []
        places = torch.tensor(positions)
        cos, sin = (table.contiguous() for table in self._rotary(places, places + 1))
        source, target = torch.tensor(candidates), torch.tensor(kept_at)
        layers, (kv_heads, head_dim) = len(cache.data), cache.data[0].shape[3:]
        struct = SettlingStruct(
            layers, kv_heads, head_dim, len(candidates), len(kept_at), source.data_ptr(), target.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), None if self._probe is None else self._probe.data_ptr(), PRECISION,
        )  # fmt: skip
        pointers = (_pointer * layers)(*(data.data_ptr() for data in cache.data))
        self._run(ctypes.byref(struct), cache.data[0].dtype == torch.float32, pointers)
        for data, held in zip(cache.data, moved, strict=bool(moves)):
            data.flatten(0, 1)[moving[:, 1]] = held
