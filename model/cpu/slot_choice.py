"""SlotChoice by the compiled kernels: a chunk settles in one call, where torch takes some twenty for each layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.structs import AnglesStruct, PlacesStruct, SettlingStruct, pointers
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.slot_choice import PRECISION, SlotChoice

_pointer = ctypes.c_void_p


class CpuSlotChoice(SlotChoice):
    """As SlotChoice; its rotary tables are float32."""

    def __init__(self, kernels: Kernels, rotary: RotaryEmbedding, probe: Tensor | None = None) -> None:
        super().__init__(rotary, probe)
        self._run = kernels.function("settle", *2 * (_pointer,))

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
        parts = [*cache.data, *cache.scales]
        moved = [part.flatten(0, 1)[moving[:, 0]] for part in parts] if moves else []
        places = torch.tensor(positions)
        tables = [(cos.contiguous(), sin.contiguous()) for cos, sin in self._rotary.of_layers(places, places + 1)]
        ropes = map(self._rotary.config.rope_of, range(len(cache.data)))
        angles = (AnglesStruct * len(tables))(
            *(
                AnglesStruct() if rope == "none" else AnglesStruct.of(of, None)
                for rope, of in zip(ropes, tables, strict=True)
            )
        )
        source, target = torch.tensor(candidates), torch.tensor(kept_at)
        assert cache.settled is not None
        owners = PlacesStruct.of(cache.settled)
        scales = pointers(cache.scales)
        layers, (kv_heads, head_dim) = len(cache.data), cache.data[0].shape[3:]
        struct = SettlingStruct(
            layers, kv_heads, head_dim, len(candidates), source.data_ptr(), target.data_ptr(), ctypes.addressof(angles),
            None if self._probe is None else self._probe.data_ptr(), ctypes.addressof(owners), PRECISION,
            8 * cache.data[0].itemsize, ctypes.addressof(scales) if scales else None,
        )  # fmt: skip
        self._run(ctypes.byref(struct), pointers(cache.data))
        for part, held in zip(parts, moved, strict=bool(moves)):
            part.flatten(0, 1)[moving[:, 1]] = held
