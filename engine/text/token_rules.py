"""TokenRules: tokens that an answer may be made of, words that it must not have, and how long it may think; beside a
grammar or alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hamburger.engine.types.sampling_params import SamplingParams, ThinkingBudget


class TokenMatcher(Protocol):
    """Where one answer stands in what it must look like. Matcher (matching.py) is one, TokenRules another."""

    @property
    def is_complete(self) -> bool:
        """Nothing but an end token may follow."""

    @property
    def error(self) -> str | None:
        """Why it can go on no more."""

    def allow(self, masks: NDArray[np.int32], row: int) -> None:
        """Write the bit mask of the tokens that may come next into masks[row], int32 [ceil(vocab_size / 32)]."""

    def forced(self) -> list[int]:
        """Tokens in which the text goes on, if there is only one way; others may spell the same. It changes nothing."""

    def advance(self, token_id: int) -> None:
        """Take a token."""

    def go_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""


class TokenRules:
    """A TokenMatcher. An answer for which nothing is left that may come next has an error."""

    def __init__(
        self,
        allowed: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        grammar: TokenMatcher | None,
        thinking: ThinkingBudget | None = None,
    ) -> None:
        """allowed: all that may come; empty for all tokens. bad_words: token ids that must not come one after the
        other, each of at least one. grammar: may be replaced by one that has taken the same tokens."""
        self.grammar = grammar
        self._allowed = allowed
        self._bad: dict[int, list[tuple[int, ...]]] = {}  # by their last token but one
        self._never = sorted({word[0] for word in bad_words if len(word) == 1})
        for word in bad_words:
            if len(word) > 1:
                self._bad.setdefault(word[-2], []).append(tuple(word))
        self._taken: list[int] = []
        self._thoughts = None if thinking is None else _Thoughts(thinking)
        self._fixed: NDArray[np.int32] | None = None  # the mask that all steps have in common
        # Tokens behind which nothing is left. They may be drafts: the answer comes to them, or takes other ones.
        self._stuck: list[int] | None = None

    @property
    def is_complete(self) -> bool:
        return self.grammar is not None and self.grammar.is_complete

    @property
    def error(self) -> str | None:
        if self._stuck is not None and self._taken[: len(self._stuck)] == self._stuck:
            return "Nothing may follow any more: allowed_token_ids, bad_words and the grammar leave no token"
        if self.grammar is None or self.grammar.error is None:
            return None
        return f"{self.grammar.error} (beside allowed_token_ids or bad_words, which may have left nothing)"

    def allow(self, masks: NDArray[np.int32], row: int) -> None:
        if self.grammar is None:
            masks[row] = -1
        else:
            self.grammar.allow(masks, row)
        if self._fixed is None:
            self._fixed = self._common(masks.shape[1])
        masks[row] &= self._fixed
        for word in self._bad.get(self._taken[-1], ()) if self._taken else ():
            if tuple(self._taken[1 - len(word) :]) == word[:-1]:
                masks[row] &= ~_bits([word[-1]], masks.shape[1])
        if self._thoughts is not None and self._thoughts.are_to_end(len(self._taken)):
            masks[row] &= _bits([self._thoughts.budget.end], masks.shape[1])
        if not masks[row].any():
            self._stuck = list(self._taken)
            masks[row] = -1  # nobody will read what is chosen

    def forced(self) -> list[int]:
        if self._thoughts is not None and self._thoughts.are_to_end(len(self._taken)):
            return [self._thoughts.budget.end]
        return [] if self.grammar is None else self.grammar.forced()

    def advance(self, token_id: int) -> None:
        self._taken.append(token_id)
        if self._thoughts is not None:
            self._thoughts.advance(token_id, len(self._taken))
        if self.grammar is not None:
            self.grammar.advance(token_id)

    def go_back(self, num_tokens: int) -> None:
        if num_tokens:
            del self._taken[-num_tokens:]
            if self._thoughts is not None:
                self._thoughts.go_back(len(self._taken))
            if self.grammar is not None:
                self.grammar.go_back(num_tokens)

    def _common(self, words: int) -> NDArray[np.int32]:
        mask = _bits(self._allowed, words) if self._allowed else np.full(words, -1, dtype=np.int32)
        return mask & ~_bits(self._never, words)


class _Thoughts:
    """Where they begin and end, in tokens of the answer."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self.budget = budget
        self._begin = 0 if budget.begin is None else None
        self._end: int | None = None

    def advance(self, token_id: int, number: int) -> None:
        """The answer has so many tokens now, the last of which is this."""
        if self._begin is None:
            self._begin = number if token_id == self.budget.begin else None
        elif self._end is None and token_id == self.budget.end:
            self._end = number

    def go_back(self, number: int) -> None:
        if self._end is not None and self._end > number:
            self._end = None
        if self._begin is not None and self._begin > number:
            self._begin = None

    def are_to_end(self, number: int) -> bool:
        return self._begin is not None and self._end is None and number - self._begin >= self.budget.tokens


def with_rules(params: SamplingParams, grammar: TokenMatcher | None) -> TokenMatcher | None:
    """What an answer must look like by its grammar and its parameters."""
    if not params.allowed_token_ids and not params.bad_words and params.thinking is None:
        return grammar
    return TokenRules(params.allowed_token_ids, params.bad_words, grammar, params.thinking)


def _bits(token_ids: Sequence[int], words: int) -> NDArray[np.int32]:
    bits = np.zeros(32 * words, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
