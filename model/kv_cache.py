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


class KVLayer(NamedTuple):
    """One layer of the cache: data [num_blocks + 1, block_size, 2, num_kv_heads, head_dim], and of int8 its scales,
    float32 without the last axis."""

    data: Tensor
    scales: Tensor | None


class PagedKVCache:
    """KV tensors for `num_blocks` blocks of `block_size` slots.

    scratch_block: one block more, that nobody owns: rows that only fill up a batch write and read there.
    """

    def __init__(
        self,
        config: TrunkConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.scratch_block = num_blocks
        shape = (num_blocks + 1, block_size, 2, config.num_kv_heads, config.head_dim)
        self.block_size = block_size
        self.data = _zeros(config.num_layers, shape, dtype, device)
        self.scales = _zeros(config.num_layers if dtype == torch.int8 else 0, shape[:-1], torch.float32, device)

    def layer(self, index: int) -> KVLayer:
        return KVLayer(self.data[index], self.scales[index] if self.scales else None)

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
        best: Callable[[Tensor], Tensor],
    ) -> None:
        """Of what the candidates' slots hold, what stays goes to kept_at; what (from, to) slots hold is copied. All at
        once: what is overwritten is read before.

        best: given what candidates hold [layers, C, 2, kv_heads, head_dim], int64 [layers, kept, kv_heads]: which of
        them each layer and KV head keeps.
        """
        device, number = self.data[0].device, len(candidates)
        sources = torch.tensor([*candidates, *(source for source, _ in moves)], device=device)
        targets = torch.tensor([*kept_at, *(target for _, target in moves)], device=device)
        parts = [
            torch.stack([of_layer.flatten(0, 1).index_select(0, sources) for of_layer in part])
            for part in (self.data, self.scales)
            if part
        ]
        held = [part[:, :number] for part in parts]
        places = best(from_int8(*held) if self.scales else held[0])[:, :, None].expand(-1, -1, 2, -1)
        for to, part in zip((self.data, self.scales), parts, strict=False):
            at = places if part.dim() == places.dim() else places[..., None].expand(*places.shape, part.shape[-1])
            written = torch.cat((part[:, :number].gather(1, at), part[:, number:]), dim=1)
            for of_layer, rows in zip(to, written, strict=True):
                of_layer.flatten(0, 1).index_copy_(0, targets, rows)

    def gather(self, layer: int, block_tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of whole block tables [B, N]: two of `dtype` [B, N * block_size, num_kv_heads, head_dim]."""
        blocks = self.data[layer].index_select(0, block_tables.flatten())
        if self.scales:
            blocks = from_int8(blocks, self.scales[layer].index_select(0, block_tables.flatten()))
        both = blocks.to(dtype).view(block_tables.shape[0], -1, *blocks.shape[2:])
        return both[:, :, 0], both[:, :, 1]


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., D] and scales float32 [...] of [..., D]: the largest is 127 or -127."""
    most = x.abs().amax(-1).float()
    inverse = torch.where(most > 0, 127 / most, 0.0)
    return (x.float() * inverse[..., None]).round().to(torch.int8), most / 127


def from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., D] of codes [..., D] and scales [...]."""
    return codes * scales[..., None]


def _zeros(number: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """On CPU they take memory only as they are written: torch.zeros would touch gigabytes at start."""
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(number)]
    num_bytes = math.prod(shape) * dtype.itemsize
    return [piece.view(dtype).view(shape) for piece in zeroed(number * num_bytes).split(num_bytes)] if number else []


def slot_bytes(config: TrunkConfig, dtype: torch.dtype) -> int:
    """Bytes one slot takes over all layers, with the scales of int8."""
    return config.slot_bytes(dtype.itemsize)
