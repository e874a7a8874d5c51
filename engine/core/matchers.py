"""Matchers: where answers stand in their grammars and token rules, from their first token on. It ends no answer."""

from __future__ import annotations

import numpy as np

from hamburger.engine.core.sequence import Sequence
from hamburger.engine.grammar.matching import Grammars, Matcher
from hamburger.engine.text.token_rules import TokenMatcher, TokenRules, with_rules
from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import SamplingParams

_MOST_RENEWALS = 3  # without a token between: others may use up what is made anew


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

    def has_failed(self, sequence: Sequence) -> bool:
        """Its grammar has an error, that of a draft too, which stays in a matcher that has gone back: what a step chose
        for it says nothing."""
        grammar = _grammar_of(sequence.matcher)
        return grammar is not None and grammar.error is not None

    def renew(self, sequence: Sequence) -> bool:
        """Put a new matcher in the place of one that failed, behind the answer's tokens; it may be that other answers
        of its grammar, or drafts, have used up what they share. False where that was tried often since its last token,
        takes long, or fails as well."""
        used, text = _grammar_of(sequence.matcher), sequence.params.grammar
        if self._grammars is None or used is None or text is None or sequence.num_renewals == _MOST_RENEWALS:
            return False
        matcher = self._grammars.renewed(text, used)
        if matcher is None:
            return False
        for token_id in sequence.output_ids:
            matcher.advance(token_id)
        if matcher.error is not None:
            return False
        sequence.num_renewals += 1
        if isinstance(sequence.matcher, TokenRules):
            sequence.matcher.grammar = matcher
        else:
            sequence.matcher = matcher
        return True

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


def _grammar_of(matcher: TokenMatcher | None) -> Matcher | None:
    found = matcher.grammar if isinstance(matcher, TokenRules) else matcher
    return found if isinstance(found, Matcher) else None
