"""Matchers: where answers stand in their grammars and token rules, from their first token on. It ends no answer."""

from __future__ import annotations

import numpy as np

from hamburger.engine.core.sequence import Sequence
from hamburger.engine.text.grammar import Grammars
from hamburger.engine.text.token_rules import TokenMatcher, TokenRules, with_rules
from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import SamplingParams


class Matchers:
    def __init__(self, grammars: Grammars | None) -> None:
        """grammars: None where no request may have one."""
        self._grammars = grammars

    def begin(self, params: SamplingParams) -> TokenMatcher | None:
        """None for an answer that may be anything. Raises InvalidRequest."""
        if params.grammar is None:
            return with_rules(params, None)
        if self._grammars is None:
            message = "This engine was built without a tokenizer, so it takes no grammar."
            raise InvalidRequest(message, "response_format")
        return with_rules(params, self._grammars.matcher(params.grammar))

    def forget_drafts(self, sequence: Sequence, token_ids: list[int]) -> None:
        """An error behind a draft stays in a matcher that has gone back: it is made anew. One behind tokens that are
        accepted comes again, but for the one that ends the answer. token_ids: those that a step confirmed."""
        grammar, matcher = sequence.params.grammar, sequence.matcher
        if self._grammars is not None and grammar is not None and matcher is not None and matcher.error is not None:
            last = next(
                (i for i, token_id in enumerate(token_ids) if token_id in sequence.end_token_ids), len(token_ids)
            )
            behind = self._grammars.matcher_behind(grammar, sequence.output_ids, token_ids[: last + 1])
            if isinstance(matcher, TokenRules):
                matcher.grammar = behind
            else:
                sequence.matcher = behind

    def num_sound(self, sequence: Sequence, num_new: int) -> int:
        """An answer's matcher failed with its newest tokens, so many: how many of them came before, and are what steps
        of one token would have told before they failed. 0 where it does not fail again."""
        if self._grammars is None:
            return 0
        try:
            matcher = self.begin(sequence.params)
        except InvalidRequest:
            matcher = None
        if matcher is None:
            return 0
        masks = np.empty((1, -(-self._grammars.vocab_size // 32)), dtype=np.int32)
        for place, token_id in enumerate(sequence.output_ids, start=num_new - len(sequence.output_ids)):
            if place >= 0:
                matcher.allow(masks, 0)
            if matcher.error is None:
                matcher.advance(token_id)
            if matcher.error is not None:
                return max(place, 0)
        matcher.allow(masks, 0)  # who drafted behind them has asked
        return 0 if matcher.error is None else num_new

    def give_up(self, sequence: Sequence) -> None:
        """Its grammar failed: the next request with the same grammar gets it anew."""
        if self._grammars is not None and sequence.params.grammar is not None:
            self._grammars.forget(sequence.params.grammar)
