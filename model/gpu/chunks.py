"""The seam for attention of prompts' chunks, the part of a step that has no fixed shape and is in no CUDA graph.

    chunks of a batch ──plan, once a step──► attend ──called once a layer──► their rows of `out`

The Triton kernel (chunk_attention.py) is behind it. No kernel is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hamburger.model.batch import ForwardBatch
from hamburger.model.config import TrunkConfig
from hamburger.model.kv_cache import KVLayer

# (q, layer, out, window): q and out [T, num_heads, head_dim]; layer: of PagedKVCache, the new slots already in
# it; window: slots that a row sees at most. Writes the chunks' rows of `out`.
AttendChunks = Callable[[Tensor, KVLayer, Tensor, int | None], None]
# settled_from and settled_slots of a ForwardBatch.
Settled = tuple[Tensor, Tensor]


class Chunk(NamedTuple):
    """New slots of one sequence. sequence: its row in the block tables. first_row: of the queries, in T.
    first_slot: the slot of the first query, as many as its sequence had before."""

    sequence: int
    first_row: int
    queries: int
    first_slot: int


class ChunkAttention(Protocol):
    """Causal attention of chunks over their sequences' slots so far, over a paged cache."""

    def plan(
        self, chunks: Sequence[Chunk], tables: Tensor, block_size: int, settled: Settled | None = None
    ) -> AttendChunks:
        """What attends in every layer of this step; the next plan makes it void.

        chunks: not empty, one after the other in T and up to its end. tables: int64 [B, N], block ids, on the device.
        settled: None where no sequence has settled slots in which places are lent.
        """


def chunks_of(batch: ForwardBatch) -> list[Chunk]:
    """The batch's sequences that bring several slots. Raises ValueError where the host lacks their contexts."""
    found: list[Chunk] = []
    row = batch.num_single
    for sequence in range(row, len(batch.query_slots)):
        if batch.context_slots_host is None:
            raise ValueError("a batch that only the device knows has one-slot rows alone.")
        queries = batch.query_slots[sequence]
        found.append(Chunk(sequence, row, queries, batch.context_slots_host[sequence] - queries))
        row += queries
    return found


def settled_of(batch: ForwardBatch) -> Settled | None:
    if batch.settled_from is None or batch.settled_slots is None:
        return None
    return batch.settled_from, batch.settled_slots


def window_of(config: TrunkConfig, layer: int) -> int | None:
    """Slots that a query of the layer sees, its own included; None where it sees all before it."""
    return config.sliding_window if layer in config.sliding_layers else None
