"""PagedKVCache: the tensors of the compressed KV cache, addressed by slot. Who owns a slot is the engine's business.

    layer i:  data[i]  [num_blocks + 1, block_size, 2, num_kv_heads, head_dim]
                        └  block id  ┘ └ offset ┘ └ key, value

Slot s lies at block s // block_size, offset s % block_size. Key and value of a slot lie side by side, so that one
gather fetches both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hamburger.model.config import TrunkConfig


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
        self.data = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at slots [T] (int64, distinct)."""
        self.data[layer].flatten(0, 1).index_copy_(0, slots, torch.stack((key, value), dim=1))

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
        read = torch.stack([data.flatten(0, 1).index_select(0, sources) for data in self.data])
        held = read[:, :number]
        places = best(held)[:, :, None, :, None].expand(-1, -1, 2, -1, held.shape[-1])
        written = torch.cat((held.gather(1, places), read[:, number:]), dim=1)
        for data, of_layer in zip(self.data, written, strict=True):
            data.flatten(0, 1).index_copy_(0, targets, of_layer)

    def gather(self, layer: int, block_tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole block tables [B, N]: two views [B, N * block_size, num_kv_heads, head_dim]."""
        blocks = self.data[layer].index_select(0, block_tables.flatten())
        both = blocks.view(block_tables.shape[0], -1, *blocks.shape[2:])
        return both[:, :, 0], both[:, :, 1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only as they are written: on CPU torch.zeros would touch gigabytes at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def slot_bytes(config: TrunkConfig, dtype: torch.dtype) -> int:
    """Bytes one slot takes over all layers."""
    return config.slot_bytes(dtype.itemsize)
