"""FlashInfer's attention for prompts' chunks, where that library is installed: its paged prefill wrapper, planned once
a step, over the cache as it lies.

Of PagedKVCache's layers keys and values are two views [blocks, block_size, kv_heads, head_dim], which is FlashInfer's
layout NHD with other strides: nothing is copied. Written for flashinfer-python 0.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hamburger.model.config import TrunkConfig
from hamburger.model.gpu.chunks import AttendChunks, Chunk, window_of

_RECOMMENDED_BYTES = 128 * 2**20
_TILE_ROWS, _TILES_A_PROCESSOR = 128, 2  # at most, of queries, in its kernels


def workspace_bytes(config: TrunkConfig, processors: int) -> int:
    """For the partial results of contexts that FlashInfer splits: it raises where a step needs more.

    Its planner makes as many tiles as run at once on the multiprocessors, and keeps an output and a sum of exponentials
    for each of their rows, in float32.
    """
    group = config.num_heads // config.num_kv_heads
    rows = _TILES_A_PROCESSOR * processors * _TILE_ROWS * group
    return max(_RECOMMENDED_BYTES, rows * (config.head_dim + 1) * 4)


@dataclass(frozen=True, slots=True)
class PageTable:
    """n chunks as FlashInfer reads them, compressed rows (CSR) in numbers of the host.

    row_starts: [n + 1], where each chunk's queries begin, counted from the first chunk's. page_starts: [n + 1], where
    its blocks begin in `places`. places: each chunk's blocks, as indices into the flattened block tables.
    last_page_slots: [n], slots in its last block, 1 to block_size. contexts: [n], slots of its sequence in all.
    """

    row_starts: list[int]
    page_starts: list[int]
    places: list[int]
    last_page_slots: list[int]
    contexts: list[int]


def page_table(chunks: Sequence[Chunk], table_width: int, block_size: int) -> PageTable:
    """table_width: columns of the block tables. Raises ValueError for chunks that do not follow each other."""
    table = PageTable([0], [0], [], [], [])
    for chunk in chunks:
        if chunk.first_row != chunks[0].first_row + table.row_starts[-1]:
            raise ValueError(f"the chunk of sequence {chunk.sequence} does not begin where the one before it ends.")
        context = chunk.first_slot + chunk.queries
        pages = -(-context // block_size)
        start = chunk.sequence * table_width
        table.places.extend(range(start, start + pages))
        table.row_starts.append(table.row_starts[-1] + chunk.queries)
        table.page_starts.append(table.page_starts[-1] + pages)
        table.last_page_slots.append(context - (pages - 1) * block_size)
        table.contexts.append(context)
    return table


class FlashInferChunks:
    """ChunkAttention by FlashInfer. Raises ImportError where it is not installed.

    config: the trunk's sizes in this process. dtype: of queries and cache, bfloat16 or float16.
    """

    def __init__(self, config: TrunkConfig, dtype: torch.dtype, device: torch.device) -> None:
        import flashinfer

        self._config, self._dtype, self._device = config, dtype, device
        size = workspace_bytes(config, _processors(device))
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        windows = sorted({window_of(config, layer) or 0 for layer in range(config.num_layers)})
        # A plan is made for one window; 0 is none. They may share the workspace: they run one after the other.
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for window in windows
        }
        self._copied: torch.cuda.Event | None = None

    def plan(self, chunks: Sequence[Chunk], tables: Tensor, block_size: int) -> AttendChunks:
        """As ChunkAttention.plan."""
        if self._copied is not None:
            # A wrapper has one pinned buffer, which its plan writes and the device copies. The step before has begun
            # by now, so its copy is done: this waits only where steps are launched faster than results are read.
            self._copied.synchronize()
        table = page_table(chunks, tables.shape[1], block_size)
        places = self._host(table.places).to(self._device, non_blocking=True)
        pages = tables.flatten().index_select(0, places).int()
        row_starts, page_starts = self._host(table.row_starts), self._host(table.page_starts)
        last_page_slots, contexts = self._host(table.last_page_slots), self._host(table.contexts)
        config = self._config
        try:
            for window, wrapper in self._wrappers.items():
                wrapper.plan(
                    row_starts,
                    page_starts,
                    pages,
                    last_page_slots,
                    config.num_heads,
                    config.num_kv_heads,
                    config.head_dim,
                    block_size,
                    causal=True,
                    window_left=window - 1,  # slots before a query's own; -1 is all of them
                    q_data_type=self._dtype,
                    kv_data_type=self._dtype,
                    seq_lens=contexts,  # or they would be computed into memory that is not pinned, and the copy waits
                )
        finally:  # a plan that runs out of memory may have begun to copy, too
            if self._device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(self._device))
        first = chunks[0].first_row

        def attend(q: Tensor, data: Tensor, out: Tensor, window: int | None) -> None:
            cache = data[:, :, 0], data[:, :, 1]
            self._wrappers[window or 0].run(q[first:], cache, out=out[first:])

        return attend

    def _host(self, values: Sequence[int]) -> Tensor:
        """int32 [len(values)], pinned for a GPU, which then fetches it in its own time."""
        return torch.tensor(values, dtype=torch.int32, pin_memory=self._device.type == "cuda")


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
