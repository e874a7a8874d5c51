"""BlockManager: which blocks of the KV pool belong to which sequences. Counts slots, never tokens; holds no tensors.

    pool        [ block 0 | block 1 | block 2 | block 3 | ... ]      num_blocks x block_size slots
    sequence    block_ids = [2, 0]: its slot i lies at block_ids[i // block_size] * block_size + i % block_size

A full block has a key (Sequence.block_key) that says what its slots and all before them were fed. It can be read by any
sequence that begins so, and is never written again; the last block of a sequence is its own. A block is

    held   by one sequence or several         idle   by none, but its content is known: whoever comes may read it
    free   its content is of no use

New blocks are taken from the free ones, the lowest id first (so ids depend only on what is free, and the used part of
the pool stays compact), then from the idle ones, the least recently used first.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection

from hamburger.engine.core.batch import SettlingChunk
from hamburger.engine.core.sequence import Sequence


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._free = list(range(num_blocks))  # heapq, so that the lowest id comes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_holders = [0] * num_blocks
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}
        self._sequences: dict[str, Sequence] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def used_slots(self) -> int:
        """Slots of all blocks that are held, filled or not."""
        return (self.num_blocks - self.num_free_blocks) * self.block_size

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence that holds nothing the known blocks that it begins with, and new ones for its other slots.

        Its last slot is never among the known ones, since what it emits is computed there. The caller has made sure
        that all of it `fits`.
        """
        found = self._find_known(sequence)
        for block_id in found:
            self._idle.pop(block_id, None)
            self._num_holders[block_id] += 1
        sequence.block_ids += found
        if not self.grow(sequence, sequence.num_slots):
            raise RuntimeError(f"{sequence.request_id} does not fit.")
        sequence.num_computed_slots = len(found) * self.block_size

    def fits(self, sequence: Sequence, reserve: int, without: Collection[Sequence] = ()) -> bool:
        """Whether `admit` would leave `reserve` blocks free, once the sequences `without` had given back theirs."""
        found = self._find_known(sequence)
        num_released = Counter(block_id for other in without for block_id in other.block_ids)
        missing = -(-sequence.num_slots // self.block_size) - len(found)
        num_free = self.num_free_blocks + sum(self._num_holders[block_id] == n for block_id, n in num_released.items())
        num_free -= sum(self._num_holders[block_id] == num_released[block_id] for block_id in found)
        return missing + reserve <= num_free

    def grow(self, sequence: Sequence, num_slots: int) -> bool:
        """Give the sequence blocks for its first `num_slots` slots. Returns whether it has them now; False changes
        nothing."""
        missing = -(-num_slots // self.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        if missing > self.num_free_blocks:
            return False
        self._sequences[sequence.request_id] = sequence
        sequence.block_ids += [self._take_block() for _ in range(missing)]
        return True

    def grow_as_far(self, sequence: Sequence, num_slots: int) -> int:
        """Give the sequence blocks for its first `num_slots` slots, or for as many of them as free blocks hold.

        No idle block is taken: a known prompt is not forgotten for what may be rejected.

        Returns for how many it has blocks now, at most num_slots.
        """
        have = len(sequence.block_ids)
        missing = -(-num_slots // self.block_size) - have
        reach = min(num_slots, (have + min(max(missing, 0), len(self._free))) * self.block_size)
        self.grow(sequence, reach)
        return reach

    def shrink(self, sequence: Sequence, num_slots: int) -> None:
        """Take back the blocks behind its first `num_slots` slots: they hold nothing that counts."""
        kept = -(-num_slots // self.block_size)
        self._release(sequence.block_ids[kept:])
        del sequence.block_ids[kept:]

    def settle(self, sequence: Sequence) -> SettlingChunk:
        """Take back what the sequence's next chunk leaves free: whole blocks out of its midst, and what is left over by
        moving all slots behind. The caller tells the sequence, and moves what is in the slots before anybody computes
        anything.

            chunk of 8, 2 stay, blocks of 4     [p p p a|b c d e|f g h i|j k    ]  ->  [p p p c|f i j k]

        At the answer's limit what stays takes the slots of the chunk that settled first, whose tokens are lost.
        """
        settling = sequence.settling
        if settling is None:
            raise RuntimeError(f"{sequence.request_id} settles nothing.")
        first, size, old = sequence.num_settled_slots, self.block_size, list(sequence.block_ids)
        index = sequence.num_settled // settling.chunk
        replaces = index >= settling.most_chunks
        end = first if replaces else first + settling.kept
        dropped = settling.chunk - (end - first)
        kept_from = first
        if replaces:
            kept_from = len(sequence.prompt_ids) + int(index % settling.most_chunks) * settling.kept
        kept_at = range(kept_from, kept_from + settling.kept)
        gone = slice(end // size, end // size + dropped // size)
        self._release(sequence.block_ids[gone])
        del sequence.block_ids[gone]
        new = sequence.block_ids
        # The block that follows the kept ones takes over what an older one held before them.
        before = [slot for slot in range(end // size * size, first) if slot not in kept_at]
        moves = [(self._place(old, slot), self._place(new, slot)) for slot in before]
        if dropped % size:
            behind = range(end, sequence.num_computed_slots - dropped)
            moves += [(self._place(old, slot + dropped), self._place(new, slot)) for slot in behind]
        return SettlingChunk(
            candidates=[self._place(old, slot) for slot in range(first, first + settling.chunk)],
            positions=[sequence.slot_position(slot) for slot in range(first, first + settling.chunk)],
            kept_at=[self._place(new, slot) for slot in kept_at],
            moves=moves,
        )

    def _place(self, block_ids: list[int], slot: int) -> int:
        """In the pool."""
        return block_ids[slot // self.block_size] * self.block_size + slot % self.block_size

    def can_grow(self, sequences: Collection[Sequence]) -> bool:
        """Whether there are blocks for all slots of all these sequences at once."""
        missing = sum(-(-s.num_slots // self.block_size) - len(s.block_ids) for s in sequences)
        return missing <= self.num_free_blocks

    def mark_computed(self, sequence: Sequence, num_slots: int) -> None:
        """Its first `num_slots` slots are in the pool: the full blocks among them can be read from now on."""
        self._make_known(sequence, min(num_slots, sequence.num_shared_slots))

    def end(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence that comes never again. Nothing of it moves any more, so its answer can be
        read as well, as by the next turn of a chat, unless some of it has settled."""
        if sequence.settling is not None and not sequence.num_settled:
            self._make_known(sequence, sequence.num_computed_slots)
        self.free(sequence)

    def _make_known(self, sequence: Sequence, num_slots: int) -> None:
        if not self._prefix_cache:
            return
        for index in range(sequence.num_known_blocks, num_slots // self.block_size):
            key, block_id = sequence.block_key(index, self.block_size), sequence.block_ids[index]
            if key not in self._block_of_key:  # else two computed the same at once, and the other's is known
                self._block_of_key[key], self._key_of_block[block_id] = block_id, key
            sequence.num_known_blocks = index + 1

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence, which may hold none."""
        self._sequences.pop(sequence.request_id, None)
        self._release(sequence.block_ids)
        sequence.block_ids.clear()
        sequence.num_known_blocks = 0

    def _find_known(self, sequence: Sequence) -> list[int]:
        if not self._prefix_cache or sequence.needs_all_slots:
            return []
        found = []
        for index in range(min(sequence.num_slots - 1, sequence.num_shared_slots) // self.block_size):
            block_id = self._block_of_key.get(sequence.block_key(index, self.block_size))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _release(self, block_ids: list[int]) -> None:
        # The last block first, because most sequences that come share only the beginning.
        for block_id in reversed(block_ids):
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                if block_id in self._key_of_block:
                    self._idle[block_id] = None
                else:
                    heapq.heappush(self._free, block_id)

    def _take_block(self) -> int:
        if self._free:
            block_id = heapq.heappop(self._free)
        else:
            block_id, _ = self._idle.popitem(last=False)
            del self._block_of_key[self._key_of_block.pop(block_id)]
        self._num_holders[block_id] = 1
        return block_id

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is free, idle or held as often as is counted, and all keys fit."""
        held = Counter(block_id for sequence in self._sequences.values() for block_id in sequence.block_ids)
        if {i: n for i, n in enumerate(self._num_holders) if n} != held:
            raise RuntimeError(f"blocks are held {dict(held)}, but counted as {self._num_holders}.")
        if sorted([*held, *self._free, *self._idle]) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"blocks leaked or used twice: held {sorted(held)}, idle {list(self._idle)}, free {sorted(self._free)}."
            )
        if {block_id: key for key, block_id in self._block_of_key.items()} != self._key_of_block:
            raise RuntimeError("the keys of blocks and the blocks of keys differ.")
        if not self._key_of_block.keys() >= set(self._idle) or self._key_of_block.keys() & set(self._free):
            raise RuntimeError("an idle block has no key, or a free one has.")
        for request_id, sequence in self._sequences.items():
            self._check(request_id, sequence)

    def _check(self, request_id: str, sequence: Sequence) -> None:
        if not sequence.num_computed_slots <= len(sequence.block_ids) * self.block_size:
            raise RuntimeError(f"{request_id} computed {sequence.num_computed_slots} slots, more than it holds.")
        if len(sequence.block_ids) > -(-sequence.num_slots // self.block_size):
            raise RuntimeError(f"{request_id} holds {len(sequence.block_ids)} blocks, more than it can fill.")
        for index, block_id in enumerate(sequence.block_ids):
            key = self._key_of_block.get(block_id)
            if key is not None and key != sequence.block_key(index, self.block_size):
                raise RuntimeError(f"{request_id} reads block {block_id}, which holds something else.")
            if self._num_holders[block_id] > 1 and key is None:
                raise RuntimeError(f"block {block_id} is shared, but nobody knows what it holds.")
