"""BlockManager: which blocks of the KV pool belong to which sequence. Counts slots, never tokens; holds no tensors.

    pool        [ block 0 | block 1 | block 2 | block 3 | ... ]      num_blocks x block_size slots
    sequence    block_ids = [2, 0]: its slot i lies at block_ids[i // block_size] * block_size + i % block_size

A block belongs to one sequence or is free. The lowest-numbered free block is taken first, so the ids depend only on
which blocks are free, and the used part of the pool stays compact.
"""

from __future__ import annotations

import heapq

from hamburger.engine.sequence import Sequence


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # a heap
        self._holders: dict[str, Sequence] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_slots(self) -> int:
        """Slots of all blocks that are taken, filled or not."""
        return (self.num_blocks - len(self._free)) * self.block_size

    def grow(self, sequence: Sequence, num_slots: int, reserve: int = 0) -> bool:
        """Give the sequence blocks for its first `num_slots` slots, unless fewer than `reserve` would stay free.

        Returns whether it has them now; False changes nothing.
        """
        missing = -(-num_slots // self.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        if missing + reserve > len(self._free):
            return False
        self._holders[sequence.request_id] = sequence
        sequence.block_ids += [heapq.heappop(self._free) for _ in range(missing)]
        return True

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence, which may hold none."""
        self._holders.pop(sequence.request_id, None)
        for block_id in sequence.block_ids:
            heapq.heappush(self._free, block_id)
        sequence.block_ids.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is free or held exactly once, and holders have room for their slots."""
        held = [block_id for sequence in self._holders.values() for block_id in sequence.block_ids]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise RuntimeError(f"blocks leaked or used twice: held {sorted(held)}, free {sorted(self._free)}.")
        for request_id, sequence in self._holders.items():
            if not sequence.num_computed_slots <= len(sequence.block_ids) * self.block_size:
                raise RuntimeError(f"{request_id} computed {sequence.num_computed_slots} slots, more than it holds.")
            if len(sequence.block_ids) > -(-sequence.num_slots // self.block_size):
                raise RuntimeError(f"{request_id} holds {len(sequence.block_ids)} blocks, more than it can fill.")
