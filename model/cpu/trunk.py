"""CpuTrunk: all layers of a trunk in one call of the kernels. model/modules/trunk.py is the plain reference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, Reads
from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.loras import CpuLoras
from hamburger.model.cpu.structs import ROPES, AdaptedStruct, AnglesStruct, BatchStruct, PlacesStruct, pointers
from hamburger.model.cpu.weights import PackedAdapters, own_floats, pack_layers
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.adapter import Embedded
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.modules.trunk import Trunk

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class CpuTrunk:
    """quantization: what the weights are, as `int4`, `int8` or `int4+int8`."""

    def __init__(
        self,
        kernels: Kernels,
        trunk: Trunk,
        bits: int | None,
        feature_layers: tuple[int, ...],
        rotary: RotaryEmbedding,
        fill: Callable[[int], None] | None = None,
    ) -> None:
        """trunk gives its layers up. bits: of the weights; None takes 4 for those that have no more, else 8. fill: as
        of CpuBackend."""
        config = trunk.config
        self._kernels, self._rotary = kernels, rotary
        self._turns = rotary.cos, rotary.sin
        self._run = kernels.function("layers", _pointer, _pointer, ctypes.c_int, *4 * (_pointer,))
        self._memory = kernels.function("layers_memory", _pointer, *2 * (_int64,))
        self.loras = CpuLoras(kernels, config)
        self._norm = own_floats(trunk.norm.weight)
        self._pool: _Pool | None = None
        self._layers = pack_layers(kernels, config, trunk.layers, bits, fill, of_trunk=True)
        self.keep(feature_layers)
        self.quantization = "+".join(f"int{bits}" for bits in sorted({w.bits for w in self._layers.weights}))

    def keep(self, feature_layers: tuple[int, ...]) -> None:
        """Give the states after these layers from now on, ascending."""
        # The kernels keep the states after a layer; those after the last are the final normed ones.
        last = self._rotary.config.num_layers - 1
        self._last_is_feature = last in feature_layers
        self._between = [layer for layer in feature_layers if layer != last]

    def _pointers(self, cache: PagedKVCache) -> _Pool:
        """Looked up once: a cache's tensors stay where they are."""
        if self._pool is None or self._pool.cache is not cache:
            self._pool = _Pool(cache, pointers(cache.data), pointers(cache.scales))
        return self._pool

    def __call__(
        self, embedded: Embedded, batch: ForwardBatch, cache: PagedKVCache, reads: Reads
    ) -> tuple[Tensor, list[Tensor]]:
        """As Trunk.forward, in float32; the embedded states are overwritten."""
        x = embedded.x.contiguous()  # one-token groups of a batch that had room for more are a view with gaps
        at: Tensor | None = batch.positions
        turns, local = self._turns, AnglesStruct()
        if batch.text_lengths is not None:  # tables that depend on the text
            cos, sin = self._rotary(batch.positions, batch.text_lengths)
            turns, at = (cos.contiguous(), sin.contiguous()), None
        if self._rotary.config.local_rope_theta is not None:
            local = AnglesStruct.of((self._rotary.local_cos, self._rotary.local_sin), batch.positions)
        angles = (AnglesStruct * len(ROPES))(AnglesStruct.of(turns, at), local)
        rows = reads.rows
        _, kv, scales = self._pointers(cache)
        query_slots, context_slots, tables, *settled = _sequences(batch)
        # shape[0], as len() of a tensor is Python's and slow; a step asks some ten times
        num_slots, num_read, num_featured = x.shape[0], rows.shape[0], reads.num_featured
        final = torch.empty(num_read, x.shape[1])
        features = [torch.empty(num_featured, x.shape[1]) for _ in self._between]
        places = (_pointer * len(cache.data))()
        for layer, states in zip(self._between, features, strict=True):
            places[layer] = states.data_ptr()
        adapted = _adapted(self._passed(embedded, batch))
        tensors = (batch.write_slots, tables, context_slots, query_slots)
        lending: tuple[int | None, ...] = (None, None, None)
        if settled and cache.settled is not None:
            owners = PlacesStruct.of(cache.settled)
            lending = ctypes.addressof(owners), *(part.data_ptr() for part in settled)
        struct = BatchStruct(
            num_slots, query_slots.shape[0], angles, *(tensor.data_ptr() for tensor in tensors),
            *lending,
            tables.shape[1], cache.block_size, 8 * cache.data[0].itemsize, ctypes.addressof(scales) if scales else None,
            rows.data_ptr(), num_featured, ctypes.addressof(places),
            self._norm.data_ptr(), rows.data_ptr(), num_read, final.data_ptr(),
            ctypes.addressof(adapted), len(adapted), self._kernels.clock_address(),
        )  # fmt: skip
        layers, ranks = self._layers, sum(of.rank for of in adapted)
        memory = self._kernels.working_memory(self._memory(layers.geometry, num_slots, ranks))
        self._run(layers.geometry, layers.structs, len(cache.data), kv, ctypes.byref(struct), x.data_ptr(), memory)
        if self._last_is_feature:
            features.append(final if num_featured == num_read else final[:num_featured])
        return final, features

    def _passed(self, embedded: Embedded, batch: ForwardBatch) -> list[tuple[Tensor, PackedAdapters]]:
        """The rows that pass adapters, with these."""
        passed = [(slots.rows, self.loras.adapters(slots.number)) for slots in batch.loras]
        composed, adapters = embedded.composed, self._layers.composed
        if composed is None or composed.rows is None or adapters is None:
            return passed
        return [(composed.rows, adapters), *passed]


class _Pool(NamedTuple):
    """Where the layers of a cache lie: its numbers, and their scales."""

    cache: PagedKVCache
    data: ctypes.Array[ctypes.c_void_p]
    scales: ctypes.Array[ctypes.c_void_p]


def _adapted(passed: Sequence[tuple[Tensor, PackedAdapters]]) -> ctypes.Array[AdaptedStruct]:
    """The rows and adapters must outlive it."""
    return (AdaptedStruct * len(passed))(
        *(
            AdaptedStruct(len(rows), rows.data_ptr(), adapters.rank, ctypes.addressof(adapters.structs))
            for rows, adapters in passed
        )
    )


def _sequences(batch: ForwardBatch) -> list[Tensor]:
    """New slots, slots in the cache, and block tables of each sequence, int64; and settled_from and settled_slots of a
    batch that has them. Drafts, which are rows of their own there, join their sequence: attention then reads its
    context once for all of them."""
    of_rows = [batch.context_slots, batch.block_tables]
    if batch.settled_from is not None and batch.settled_slots is not None:
        of_rows += [batch.settled_from, batch.settled_slots]
    # Lists: a dozen operations on short tensors take several times as long.
    emit, checks = batch.emit.tolist(), [] if batch.checks is None else batch.checks.tolist()
    followed = {slot for slot, check in zip(emit, checks, strict=False) if check >= 0}
    if not followed:
        return [_int64s(batch.query_slots), *of_rows]
    joined: list[int] = []
    last: list[int] = []
    number = 0
    for row, new in enumerate(batch.query_slots):
        number += new
        if row not in followed:  # one-slot rows come first, so that slot and row are one number
            joined.append(number)
            last.append(row)
            number = 0
    rows = _int64s(last)
    return [_int64s(joined), *(part.index_select(0, rows) for part in of_rows)]


def _int64s(values: list[int]) -> Tensor:
    """torch.tensor takes several times as long."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
