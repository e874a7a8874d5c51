"""PagedKVCache: the tensors of the compressed KV cache, addressed by slot. Who owns a slot is the engine's business.

    layer i:  data[i]  [num_blocks + 1, block_size, 2, num_kv_heads, head_dim]
                        └  block id  ┘ └ offset ┘ └ key, value

Slot s lies at block s // block_size, offset s % block_size. Key and value of a slot lie side by side, so that one
gather fetches both. In int8 a head's key or value is its codes, of -127 to 127, times a scale of its own:

             scales[i]  [num_blocks + 1, block_size, 2, num_kv_heads]  float32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hamburger.model.config import TrunkConfig
from hamburger.model.device.host_memory import zeroed
from hamburger.model.settled_places import SettledPlaces


class Lending(NamedTuple):
    """Whose places in settled slots the KV heads of a layer have, as kernels read it (SettledPlaces).

    offsets: int64 [most, kv_heads], how many heads' vectors behind a head's own key in a slot that of its first,
    second, ... lender lies. lenders: int64 [kv_heads], how many it has. lends, kept, lent: as of SettledPlaces.
    """

    offsets: Tensor
    lenders: Tensor
    lends: Tensor
    kept: int
    lent: int


class KVLayer(NamedTuple):
    """One layer of the cache: data [num_blocks + 1, block_size, 2, num_kv_heads, head_dim], and of int8 its scales,
    float32 without the last axis. lending: None where no places are lent."""

    data: Tensor
    scales: Tensor | None
    lending: Lending | None = None


class PagedKVCache:
    """KV tensors for `num_blocks` blocks of `block_size` slots.

    scratch_block: one block more, that nobody owns: rows that only fill up a batch write and read there. settled: whose
    settled slots' places are; None where nothing settles. Layers lie one after the other, each as far behind the one
    before.
    """

    def __init__(
        self,
        config: TrunkConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        settled: SettledPlaces | None = None,
    ) -> None:
        self.scratch_block, self.settled = num_blocks, settled
        shape = (num_blocks + 1, block_size, 2, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self.data = _zeros(config.num_layers, shape, dtype, device)
        # Each layer's scales lie apart: a page of 2 MiB of each took 60 MiB of the default, in which they have 5.
        num_scaled = config.num_layers if dtype == torch.int8 else 0
        self.scales = _zeros(num_scaled, shape[:-1], torch.float32, device, large_pages=False)
        self._lending: list[Lending] = []
        if settled is not None and settled.lent:
            self._lending = _lending(settled, math.prod(shape[:-1]), device)

    @property
    def lends(self) -> bool:
        """Whether places in settled slots are lent."""
        return bool(self._lending)

    def layer(self, index: int) -> KVLayer:
        scales = self.scales[index] if self.scales else None
        return KVLayer(self.data[index], scales, self._lending[index] if self._lending else None)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at slots [T] (int64, distinct)."""
        data, both = self.data[layer].flatten(0, 1), torch.stack((key, value), dim=1)
        if self.scales:
            both, scales = to_int8(both)
            self.scales[layer].flatten(0, 1).index_copy_(0, slots, scales)
        data.index_copy_(0, slots, both.to(data.dtype))

    def settle(
        self,
        candidates: Sequence[int],
        kept_at: Sequence[int],
        moves: Sequence[tuple[int, int]],
        sources_of: Callable[[Tensor], Tensor],
    ) -> None:
        """Of what the candidates' slots hold, what stays goes to kept_at; what (from, to) slots hold is copied. All at
        once: what is overwritten is read before.

        sources_of: given what candidates hold [layers, C, 2, kv_heads, head_dim], what each place at kept_at shall,
            as SettledPlaces.sources.
        """
        device = self.data[0].device
        places, kept_to = (torch.tensor(slots, device=device) for slots in (candidates, kept_at))
        moved_from, moved_to = torch.tensor(moves, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        parts = [part for part in (self.data, self.scales) if part]
        # Of all layers what is looked at, but only of one at a time what just moves: that may be a long answer.
        held = [torch.stack([layer.flatten(0, 1).index_select(0, places) for layer in part]) for part in parts]
        sources = sources_of(from_int8(*held) if self.scales else held[0])
        for part, of_chunk in zip(parts, held, strict=True):
            # [layers * kv_heads * C, 2, ...], of which each place takes one.
            kept = of_chunk.movedim(3, 1).flatten(0, 2)[sources].movedim(3, 2)
            for layer, rows in zip(part, kept, strict=True):
                slots = layer.flatten(0, 1)
                moved = slots.index_select(0, moved_from)
                slots.index_copy_(0, kept_to, rows)
                slots.index_copy_(0, moved_to, moved)

    def gather(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of slots int64 [B, L]: two of `dtype` [B, L, num_kv_heads, head_dim]."""
        both = self.data[layer].flatten(0, 1).index_select(0, slots.flatten())
        if self.scales:
            both = from_int8(both, self.scales[layer].flatten(0, 1).index_select(0, slots.flatten()))
        both = both.to(dtype).view(*slots.shape, *both.shape[1:])
        return both[:, :, 0], both[:, :, 1]

    def gather_lent(
        self, layer: int, number: int, slots: Tensor, lent: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The same of the places that each of the layer's heads has of its lender `number`, where they are `lent`, bool
        [B, L]; elsewhere its own, as a lender in a later layer has not written its new slots yet."""
        assert self.settled is not None
        keys, values = self.gather(layer, slots, dtype)
        for head, lender in enumerate(self.settled.lenders[layer, :, number].tolist()):
            if lender >= 0:
                of, there = divmod(lender, keys.shape[2])
                their_keys, their_values = self.gather(of, slots, dtype)
                for own, theirs in ((keys, their_keys), (values, their_values)):
                    own[:, :, head] = torch.where(lent[..., None], theirs[:, :, there], own[:, :, head])
        return keys, values


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., D] and scales float32 [...] of [..., D]: the largest is 127 or -127."""
    most = x.abs().amax(-1).float()
    inverse = torch.where(most > 0, 127 / most, 0.0)
    return (x.float() * inverse[..., None]).round().to(torch.int8), most / 127


def from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., D] of codes [..., D] and scales [...]."""
    return codes * scales[..., None]


def _lending(settled: SettledPlaces, vectors: int, device: torch.device) -> list[Lending]:
    """Of each layer. vectors: of heads, in a layer."""
    layers, kv_heads, _ = settled.lenders.shape
    # Where a head's vector of a cache's first slot lies.
    starts = torch.arange(layers)[:, None] * vectors + torch.arange(kv_heads)
    offsets = (starts.flatten()[settled.lenders] - starts[:, :, None]).transpose(1, 2).contiguous()
    offsets, lenders, lends = (x.to(device) for x in (offsets, (settled.lenders >= 0).sum(-1), settled.lends))
    return [Lending(offsets[i], lenders[i], lends[i], settled.kept, settled.lent) for i in range(layers)]


def _zeros(
    number: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, large_pages: bool = True
) -> list[Tensor]:
    """On CPU they take memory only as they are written: torch.zeros would touch gigabytes at start."""
    if device.type != "cpu":
        whole = torch.zeros(number, *shape, dtype=dtype, device=device)
        return [whole[index] for index in range(number)]
    num_bytes = math.prod(shape) * dtype.itemsize
    if not number:
        return []
    whole = zeroed(number * num_bytes, large_pages=large_pages)
    return [piece.view(dtype).view(shape) for piece in whole.split(num_bytes)]


def slot_bytes(config: TrunkConfig, dtype: torch.dtype) -> int:
    """Bytes one slot takes over all layers, with the scales of int8."""
    return config.slot_bytes(dtype.itemsize)
