"""Sequence: one answer in the making, and the only place that trims a group. No tensors, no text, no clock.

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

import math
from array import array
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b

from hamburger.engine.drafting.answer_drafts import AnswerDrafts
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.text.token_rules import TokenMatcher
from hamburger.engine.types.messages import (
    CheckedDrafts,
    FinishReason,
    GroupOutput,
    Groups,
    SubmitRequest,
    TokenLogprobs,
)
from hamburger.engine.types.settling import Settling


class Sequence:
    """One request's state. Only the scheduler, the block manager and `accept` change it; the runner reads it.

    groups: what the answer's slots are fed, if all have one: composed groups, trimmed, or single tokens. output_ids:
        the same tokens, flat.
    settling: when its old tokens settle; None where they never do. num_settled: the answer's first tokens, which have.
        num_kept: slots that are left of them; which tokens they hold is each layer's and KV head's own choice.
        num_dropped: slots that they gave back.
    proposal: drafts of what follows, by the micro-step decoder; None where there are none. drafters: who else drafts.
    lora: the number of the LoRA adapter that all of its slots pass; 0: the base's.
    num_computed_slots: slots whose KV is in the pool, or will be before any step that is launched from now on; always a
        prefix. block_ids: where they are, in order.
    awaits_group: a step that still runs emits its next group, and the slot of that group is being planned (overlap.py).
    num_known_blocks: the first of them whose content the block manager knows.
    num_cached_slots: prompt slots that were found in the pool when it first ran.
    prompt_logprobs: entries of the prompt's first tokens, as far as known (a replay keeps them); None if not asked.
    rank: its place among all, the lowest first: priority, and the order in which they first ran (the scheduler sets
        it); infinite before that.
    matcher: where it stands in its grammar; None without one (the core sets it).
    scheduled_time: when it first got slots; None while it never did.
    """

    def __init__(
        self,
        request: SubmitRequest,
        eos_token_ids: Collection[int],
        max_model_len: int,
        groups: Groups = "composed",
        settling: Settling | None = None,
    ) -> None:
        """settling: of the engine; a request may ask that all its tokens keep their slots."""
        params = request.params
        self.settling = None if params.settle is False else settling
        self._set_settled(0)
        self._most_settled = 0  # in any of its lives
        self.is_verified = groups == "verified"
        self.proposal: Proposal | None = None
        self.drafters: AnswerDrafts | None = None
        if self.is_verified and params.confidence != 1:
            self.drafters = AnswerDrafts(request.prompt_ids, params.prediction_ids)
        self.num_macro_steps = 0
        self.request_id = request.request_id
        self.prompt_ids = request.prompt_ids
        self.params = params
        self.arrival_time = request.arrival_time
        self.cache_salt = request.cache_salt
        self.priority = request.priority
        self.client = request.client
        self.lora = request.lora
        self.rank: tuple[int, float] = (request.priority, math.inf)
        self.matcher: TokenMatcher | None = None
        self.scheduled_time: float | None = None
        self.groups: list[list[int]] = []
        self.output_ids: list[int] = []
        self.num_computed_slots = 0
        self.awaits_group = False
        is_scored = params.prompt_logprobs is not None and request.scores_prompt
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if is_scored else None
        self.num_known_blocks = 0
        self.num_cached_slots = 0
        self.block_ids: list[int] = []
        self._block_keys = [_first_key(request.cache_salt, request.lora)]
        self.end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {*eos_token_ids})
        self.sorted_end_ids = sorted(self.end_token_ids)
        context_left = max_model_len - len(self.prompt_ids)
        self._max_output_tokens = context_left if params.max_tokens is None else min(params.max_tokens, context_left)
        self._group_positions: list[int] = []

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
            return len(self.prompt_ids) + self._max_output_tokens
        computed = self.num_computed_outputs
        return self.settling.next_place(max(computed, 0), self.num_settled) - computed

    @property
    def num_shared_slots(self) -> int:
        """The first slots, which other sequences may read: those that stay where they are."""
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

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens_left(self) -> int:
        """Most tokens that the next group may keep: what max_tokens and the context leave. A group that it awaits takes
        at least one."""
        return self._max_output_tokens - len(self.output_ids) - self.awaits_group

    def slot_tokens(self, slot: int) -> SequenceOf[int]:
        """The tokens that feed a slot: one prompt token, or a whole group."""
        num_prompt = len(self.prompt_ids)
        return self.prompt_ids[slot : slot + 1] if slot < num_prompt else self.groups[self._place(slot)]

    def slot_position(self, slot: int) -> int:
        """The slot's rotary position: the index of its last token."""
        num_prompt = len(self.prompt_ids)
        return slot if slot < num_prompt else self._group_positions[self._place(slot)]

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

    @property
    def needs_all_slots(self) -> bool:
        """Slots that are read from the pool give no log-probabilities: it wants some of its prompt that are unknown."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def adjusts_logits(self) -> bool:
        """It asks for penalties or bias, or has not reached min_tokens, which only matters until then."""
        p = self.params
        return bool(
            p.presence_penalty
            or p.frequency_penalty
            or p.repetition_penalty != 1
            or p.logit_bias
            or self.num_output_tokens < p.min_tokens
        )

    @property
    def needs_logits(self) -> bool:
        """Its logits are changed or told, so that a step with it takes longer (DraftPolicy)."""
        return self.matcher is not None or self.params.logprobs is not None or self.adjusts_logits

    @property
    def is_prompt_only(self) -> bool:
        """It asks for no token (max_tokens is 0): it ends with its last prompt slot and never emits."""
        return self._max_output_tokens == 0

    def unscored(self, num_slots: int) -> range:
        """The prompt tokens that the next `num_slots` slots predict, whose log-probabilities are asked and unknown."""
        if self.prompt_logprobs is None:
            return range(0)
        # Slot i predicts token i + 1.
        return range(len(self.prompt_logprobs), min(self.num_computed_slots + num_slots + 1, len(self.prompt_ids)))

    def score(self, prompt_logprobs: SequenceOf[TokenLogprobs]) -> None:
        """Entries of the prompt tokens that the slots computed so far predict, as far as they were unknown."""
        if len(prompt_logprobs) != len(self.unscored(0)):
            raise RuntimeError(
                f"{self.request_id} got {len(prompt_logprobs)} prompt log-probabilities, not those of "
                f"{self.unscored(0)}."
            )
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += prompt_logprobs

    def finish_prompt(self) -> GroupOutput:
        """The only output of a sequence that is_prompt_only, once all its slots are computed."""
        if not self.is_prompt_only or self.num_computed_slots < self.num_slots:
            raise RuntimeError(f"{self.request_id} cannot end with its prompt.")
        return self._output([], [], None if self.params.logprobs is None else [], "length", None)

    def accept(
        self,
        token_ids: list[int],
        stop_probs: list[float],
        logprobs: list[TokenLogprobs] | None,
        drafts: CheckedDrafts | None = None,
    ) -> GroupOutput:
        """Append a group of at least one token, cut after the token that ends the answer (which counts and is kept).

        An end or stop token ends it once min_tokens tokens came before; so do the token that completes its grammar,
        max_tokens and the context. A token that does both is reported as a stop.
        """
        self.awaits_group = False
        if not token_ids or self.num_tokens_left < 1:
            raise RuntimeError(f"{self.request_id} cannot take the group {token_ids}: empty, or after the end.")
        kept = 0
        finish_reason: FinishReason | None = None
        stop_token_id: int | None = None
        for kept, token_id in enumerate(token_ids, start=1):
            num_output_tokens = len(self.output_ids) + kept
            if token_id in self.end_token_ids and num_output_tokens > self.params.min_tokens:
                finish_reason, stop_token_id = "stop", token_id
                break
            if self.matcher is not None:
                self.matcher.advance(token_id)
                if self.matcher.is_complete:
                    finish_reason = "stop"
                    break
            if num_output_tokens == self._max_output_tokens:
                finish_reason = "length"
                break
        group = token_ids[:kept]
        self.num_macro_steps += 1
        for fed in [[token_id] for token_id in group] if self.is_verified else [group]:
            self.groups.append(fed)
            self.output_ids += fed
            self._group_positions.append(self.num_tokens - 1)
        if self.is_verified:  # the slots of its tokens but the last were computed as drafts
            self.num_computed_slots += kept - 1
        kept_logprobs = None if logprobs is None else logprobs[:kept]
        if drafts is not None and drafts.num_accepted > kept:  # those behind the end were never tokens
            drafts = drafts._replace(num_accepted=kept)
        return self._output(group, stop_probs[:kept], kept_logprobs, finish_reason, stop_token_id, drafts)

    def _output(
        self,
        token_ids: list[int],
        stop_probs: list[float],
        logprobs: list[TokenLogprobs] | None,
        finish_reason: FinishReason | None,
        stop_token_id: int | None,
        drafts: CheckedDrafts | None = None,
    ) -> GroupOutput:
        if self.scheduled_time is None:
            raise RuntimeError(f"{self.request_id} is not running.")
        return GroupOutput(
            request_id=self.request_id,
            token_ids=token_ids,
            stop_probs=stop_probs,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            scheduled_time=self.scheduled_time,
            prompt_logprobs=self.prompt_logprobs if self.num_macro_steps < 2 else None,
            cached_slots=self.num_cached_slots if self.num_macro_steps < 2 else 0,
            drafts=drafts,
            dropped_slots=self.num_dropped,
        )


def _first_key(salt: str, lora: int) -> bytes:
    """Where the chain of block keys begins; no salt can spell the key of a block, nor that of another adapter."""
    key, person = lora.to_bytes(8, "big"), b"salt"
    return blake2b(salt.encode(errors="surrogatepass"), key=key, digest_size=16, person=person).digest()
