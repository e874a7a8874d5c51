"""Sequence: one answer in the making, and the only place that trims a group. No tensors, no text, no clock.

Its tokens are its text; its slots in the KV pool are another number (slots.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from hamburger.engine.core.slots import SequenceSlots
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


class Sequence(SequenceSlots):
    """One request's state. Only the scheduler, the block manager and `accept` change it; the runner reads it.

    output_ids: the tokens of `groups`, flat.
    proposal: drafts of what follows, by the micro-step decoder; None where there are none. drafters: who else drafts.
    lora: the number of the LoRA adapter that all of its slots pass; 0: the base's.
    prompt_logprobs: entries of the prompt's first tokens, as far as known (a replay keeps them); None if not asked.
    rank: its place among all, the lowest first: priority, and the order in which they first ran (the scheduler sets
        it); infinite before that.
    matcher: where it stands in its grammar; None without one (the core sets it).
    num_renewals: how often the matcher was made anew since the last token; nothing is drafted then.
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
        context_left = max_model_len - len(request.prompt_ids)
        most_tokens = context_left if params.max_tokens is None else min(params.max_tokens, context_left)
        super().__init__(request, most_tokens, None if params.settle is False else settling)
        self.is_verified = groups == "verified"
        self.proposal: Proposal | None = None
        self.drafters: AnswerDrafts | None = None
        if self.is_verified and params.confidence != 1:
            self.drafters = AnswerDrafts(request.prompt_ids, params.prediction_ids)
        self.num_macro_steps = 0
        self.params = params
        self.arrival_time = request.arrival_time
        self.cache_salt = request.cache_salt
        self.priority = request.priority
        self.client = request.client
        self.lora = request.lora
        self.rank: tuple[int, float] = (request.priority, math.inf)
        self.matcher: TokenMatcher | None = None
        self.num_renewals = 0
        self.scheduled_time: float | None = None
        self.output_ids: list[int] = []
        is_scored = params.prompt_logprobs is not None and request.scores_prompt
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if is_scored else None
        self.end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {*eos_token_ids})
        self.sorted_end_ids = sorted(self.end_token_ids)

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
        return self.max_output_tokens - len(self.output_ids) - self.awaits_group

    @property
    def needs_all_slots(self) -> bool:
        """Slots that are read from the pool give no log-probabilities: it wants some of its prompt that are unknown."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def adjusts_logits(self) -> bool:
        """It asks for penalties or bias, or has not reached min_tokens, which only matters until then."""
        p = self.params
        return p.has_penalties or bool(p.logit_bias) or self.num_output_tokens < p.min_tokens

    @property
    def needs_logits(self) -> bool:
        """A grammar follows it or its logits are told, so that a step with it takes longer (DraftPolicy)."""
        return self.matcher is not None or self.params.logprobs is not None

    @property
    def is_prompt_only(self) -> bool:
        """It asks for no token (max_tokens is 0): it ends with its last prompt slot and never emits."""
        return self.max_output_tokens == 0

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
        self.awaits_group, self.num_renewals = False, 0
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
            if num_output_tokens == self.max_output_tokens:
                finish_reason = "length"
                break
        group = token_ids[:kept]
        self.num_macro_steps += 1
        for fed in [[token_id] for token_id in group] if self.is_verified else [group]:
            self.groups.append(fed)
            self.output_ids += fed
            self.group_positions.append(self.num_tokens - 1)
        if self.is_verified:  # the slots of its tokens but the last were computed as drafts
            self.num_computed_slots += kept - 1
        kept_logprobs = None if logprobs is None else logprobs[:kept]
        if drafts is not None and drafts.num_accepted > kept:  # those behind the end were never tokens
            drafts = drafts._replace(num_accepted=kept)
        return self._output(group, stop_probs[:kept], kept_logprobs, finish_reason, stop_token_id, drafts)

    def take_back(self) -> None:
        """What a step chose for it does not count: its newest slot is computed again."""
        self.num_computed_slots -= 1
        self.proposal = None

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
