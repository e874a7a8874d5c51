"""Grammars, compiled and followed, token by token.

This file and writing.py are the only ones that know llguidance; no torch. The library is loaded with the first grammar:
an engine that serves none works without it (benchmarks/gpu.sh).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hamburger.engine.grammar.cache import GrammarCache
from hamburger.engine.grammar.json_numbers import DigitTokens, NumberLimit, is_of_json
from hamburger.engine.grammar.vocabulary import GrammarTokenizer, Vocabulary
from hamburger.engine.grammar.writing import shown
from hamburger.engine.process_usage import resident_bytes
from hamburger.engine.types.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NO_END_TOKEN = "The model has no end token, without which no grammar works."
_MAX_LEXER_STATES = 50_000  # 1 to 2 kB each
_MOST_SECONDS_AGAIN = 0.5  # to compile a grammar between two steps


class Grammars:
    """Compiles grammars for one vocabulary, and remembers the last ones. Any thread may use it."""

    def __init__(self, load: Callable[[], GrammarTokenizer], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """load: gives the tokenizer, when the first grammar comes. vocab_size: the model's, which may be padded beyond
        the tokenizer's."""
        self._load = load
        self.vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._digits: DigitTokens | None = None
        self._compiled: GrammarCache[_Compiled] = GrammarCache()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> LLMatcher:
        """The grammar before its first token; to be copied, never advanced. May take some 100 ms for a complex one.

        Raises InvalidRequest that says what of it is impossible, not supported or too complex.
        """
        return self._source(grammar).matcher

    def _source(self, grammar: str) -> _Compiled:
        from llguidance import LLMatcher, LLParserLimits

        if (found := self._compiled.get(grammar)) is not None:
            return found
        with self._lock:
            vocabulary = self._vocabulary = self._vocabulary or self._build()
        before, began = resident_bytes(), time.monotonic()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=_MAX_LEXER_STATES))
        tried = matcher.deep_copy()
        tried.compute_bitmask()  # some are too complex only for their first token
        for error in (matcher.get_error(), tried.get_error()):
            if error:
                # The library's word for a schema that only leads to itself.
                why = "nothing can be written by it" if "NoExtensionBias" in error else shown(error)
                raise InvalidRequest(f"The grammar cannot be used: {why}.", "response_format")
        # Others may have taken memory meanwhile: it counts for more then, and is compiled anew sooner.
        source = _Compiled(matcher, time.monotonic() - began)
        self._compiled.put(grammar, source, max(len(grammar), resident_bytes() - before))
        return source

    def prepare(self) -> None:
        """Read the vocabulary now. Raises InvalidRequest where no grammar works."""
        with self._lock:
            self._vocabulary = self._vocabulary or self._build()

    def forget(self, grammar: str) -> None:
        """Compile it anew the next time: what answers share of it is used up."""
        self._compiled.forget(grammar)

    def forget_unused(self, seconds: float) -> None:
        """What nobody has used for so long."""
        self._compiled.forget_unused(seconds)

    def matcher(self, grammar: str) -> Matcher:
        """The grammar for one answer. Raises InvalidRequest as `compile` does."""
        source = self._source(grammar)
        limit = NumberLimit(self._digits) if self._digits is not None and is_of_json(grammar) else None
        matcher = Matcher(source, self._eos_token_ids, limit)
        self._compiled.count_use(grammar)
        return matcher

    def renewed(self, grammar: str, used: Matcher) -> Matcher | None:
        """In the place of a matcher that failed: what answers of one compiled grammar share may be used up by others.
        Of what was compiled since, or compiled now; None where that takes long, as steps would wait for it."""
        if used.source.seconds > _MOST_SECONDS_AGAIN:
            return None
        if self._compiled.get(grammar) is used.source:
            self.forget(grammar)
        return self.matcher(grammar)

    def _build(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise InvalidRequest(NO_END_TOKEN, "response_format")
        from llguidance import LLTokenizer

        vocabulary = Vocabulary(self._load(), self.vocab_size, self._eos_token_ids[0])
        self._digits = DigitTokens(vocabulary.tokens, -(-self.vocab_size // 32))
        return LLTokenizer(vocabulary, eos_token=self._eos_token_ids)  # type: ignore[arg-type]


class _Compiled(NamedTuple):
    """A grammar before its first token. seconds: that it took to compile."""

    matcher: LLMatcher
    seconds: float


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, source: _Compiled, eos_token_ids: Collection[int], number_limit: NumberLimit | None) -> None:
        self.source = source
        self._matcher = source.matcher.deep_copy()
        self._number_limit = number_limit
        self._eos_token_ids = eos_token_ids
        self._has_ended = False  # by an end token, which the library does not count

    @property
    def is_complete(self) -> bool:
        """Nothing but an end token may follow."""
        return self._has_ended or (bool(self._matcher.is_stopped()) and not self._matcher.is_error())

    @property
    def error(self) -> str | None:
        """Why it can go on no more: the grammar became too complex, or a token was taken that it does not allow."""
        if not self._matcher.is_error():
            return None
        why = shown(self._matcher.get_error())
        return f"The grammar became too complex, or the answer left it ({why}): simplify it"

    def allow(self, masks: NDArray[np.int32], row: int) -> None:
        """Write the bit mask of the tokens that may come next into masks[row], int32 [ceil(vocab_size / 32)]."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, masks, row)
        if self._number_limit is not None:
            self._number_limit.narrow(masks[row])

    def forced(self) -> list[int]:
        """Tokens in which the text goes on, if there is only one way; others may spell the same. It changes nothing."""
        if self.is_complete or self._matcher.is_error():
            return []
        tokens: list[int] = self._matcher.deep_copy().compute_ff_tokens()  # an error would stay in the matcher
        return [token_id for token_id in tokens if token_id not in self._eos_token_ids]

    def advance(self, token_id: int) -> None:
        """Take a token. One that is not allowed is an `error` from then on."""
        if token_id in self._eos_token_ids:
            self._has_ended = True
            return
        self._matcher.consume_token(token_id)
        if self._number_limit is not None:
            self._number_limit.advance(token_id)

    def go_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        if self._has_ended and num_tokens:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            if self._number_limit is not None:
                self._number_limit.go_back(num_tokens)
