"""SequenceSlots: what a sequence has in the KV pool, slot by slot. It ends no answer, and knows no text.

A sequence has two lengths. Its tokens are its text; its slots are its KV entries:

    tokens      p0 p1 p2 | a b c | d | e f        prompt, then the tokens of three groups
    slots       0  1  2    3       4   5          one for a prompt token, one for a whole group
    positions   0  1  2    5       6   8          rotary position: the index of the slot's last token

That is so with composed groups. With verified ones each token has a slot of its own, and slot and position are one
number; a macro-step computes the newest token's slot, and those of drafts, of which it keeps what it confirms.

Where old tokens settle (settling.py), each chunk of them keeps some slots, and all slots behind move up:

    tokens      p0 p1 p2 | a b c d | e f g h | i j k     the first chunk has settled, two of its slots stay: what they
    slots       0  1  2    3 4       5 6 7 8   9 ...     hold, each layer and KV head chooses for itself
    positions   0  1  2              7 8 9 10  11 ...
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.settling import Settling


class SequenceSlots:
    """The slots of one request's sequence (sequence.py). Only the scheduler, the block manager and `Sequence.accept`
    change it; the runner reads it.

    groups: what the answer's slots are fed, if all have one: composed groups, trimmed, or single tokens.
    settling: when its old tokens settle; None where they never do. num_settled: the answer's first tokens, which have.
        num_kept: slots that are left of them; which tokens they hold is each layer's and KV head's own choice.
        num_dropped: slots that they gave back.
    num_computed_slots: slots whose KV is in the pool, or will be before any step that is launched from now on; always a
        prefix. block_ids: where they are, in order.
    awaits_group: a step that still runs emits its next group, and the slot of that group is being planned (overlap.py).
    num_known_blocks: the first of them whose content the block manager knows.
    num_cached_slots: prompt slots that were found in the pool when it first ran.
    """

    def __init__(self, request: SubmitRequest, max_output_tokens: int, settling: Settling | None) -> None:
        self.request_id = request.request_id
        self.prompt_ids = request.prompt_ids
        self.max_output_tokens = max_output_tokens
        self.settling = settling
        self._set_settled(0)
        self._most_settled = 0  # in any of its lives
        self.groups: list[list[int]] = []
        self.group_positions: list[int] = []  # of each group's last token
        self.num_computed_slots = 0
        self.awaits_group = False
        self.num_known_blocks = 0
        self.num_cached_slots = 0
        self.block_ids: list[int] = []
        self._block_keys = [_first_key(request.cache_salt, request.lora)]

    @property
    def num_slots(self) -> int:
        """Slots of all tokens so far, and of the group that it awaits; the newest group's slot is computed by the next
        macro-step."""
        return len(self.prompt_ids) + len(self.groups) + self.awaits_group - self.num_dropped

    @property
    def num_computed_outputs(self) -> int:
        """Tokens of the answer whose slots were computed; below 0 while the prompt's are not all."""
        return self.num_computed_slots + self.num_dropped - len(self.prompt_ids)

    @property
    def num_settled_slots(self) -> int:
        """Of the prompt, and those that are left of settled tokens."""
        return len(self.prompt_ids) + self.num_kept

    @property
    def settles(self) -> bool:
        """A chunk settles before any further slot is computed."""
        return self.settling is not None and self.settling.is_due(self.num_computed_outputs, self.num_settled)

    @property
    def num_slots_at_once(self) -> int:
        """Most slots that may be computed before a chunk settles; as many as there may be where none ever does."""
        if self.settling is None:
            return len(self.prompt_ids) + self.max_output_tokens
        computed = self.num_computed_outputs
        return self.settling.next_place(max(computed, 0), self.num_settled) - computed

    @property
    def num_shared_slots(self) -> int:
        """The first slots, which other sequences may read while it runs: those that stay where they are."""
        return self.num_slots if self.settling is None else len(self.prompt_ids)

    def settle(self) -> bool:
        """The next chunk has settled. Whether for the first time: not in a replay."""
        if self.settling is None or not self.settles:
            raise RuntimeError(f"{self.request_id} settles nothing now.")
        held = self.num_kept + self.settling.chunk
        self._set_settled(self.num_settled + self.settling.chunk)
        self.num_computed_slots -= held - self.num_kept
        is_new = self.num_settled > self._most_settled
        self._most_settled = max(self._most_settled, self.num_settled)
        return is_new

    def forget_slots(self) -> None:
        """Nothing of it is in the pool: all tokens are to be computed again."""
        self.num_computed_slots = 0
        self._set_settled(0)

    def _set_settled(self, number: int) -> None:
        self.num_settled = number
        self.num_kept = 0 if self.settling is None else self.settling.kept_slots(number)
        self.num_dropped = number - self.num_kept

    def slot_tokens(self, slot: int) -> SequenceOf[int]:
        """The tokens that feed a slot: one prompt token, or a whole group."""
        num_prompt = len(self.prompt_ids)
        return self.prompt_ids[slot : slot + 1] if slot < num_prompt else self.groups[self._place(slot)]

    def slot_position(self, slot: int) -> int:
        """The slot's rotary position: the index of its last token."""
        num_prompt = len(self.prompt_ids)
        return slot if slot < num_prompt else self.group_positions[self._place(slot)]

    def _place(self, slot: int) -> int:
        """In `groups`, of a slot of the answer that has not settled: those that have hold no token of their own."""
        if slot < self.num_settled_slots:
            raise IndexError(f"slot {slot} of {self.request_id} has settled.")
        return slot - len(self.prompt_ids) + self.num_dropped

    def block_key(self, index: int, block_size: int) -> bytes:
        """What a full block, and all before it, was fed: a chain of hashes over groups, begun with the request's salt
        and LoRA adapter.

        Group boundaries count, so composed and single slots of the same tokens never have one key.
        """
        while len(self._block_keys) <= index + 1:
            start = (len(self._block_keys) - 1) * block_size
            fed = array("Q")
            for slot in range(start, start + block_size):
                tokens = self.slot_tokens(slot)
                fed.append(len(tokens))
                fed.extend(tokens)
            self._block_keys.append(blake2b(self._block_keys[-1] + fed.tobytes(), digest_size=16).digest())
        return self._block_keys[index + 1]


def _first_key(salt: str, lora: int) -> bytes:
    """Where the chain of block keys begins; no salt can spell the key of a block, nor that of another adapter."""
    key, person = lora.to_bytes(8, "big"), b"salt"
    return blake2b(salt.encode(errors="surrogatepass"), key=key, digest_size=16, person=person).digest()
