"""JSON numbers of a bounded length: a schema bounds a number's value, not its digits, and small models write on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Of a whole number or of a fraction; 20 hold any 64-bit integer, 17 any double.
MAX_DIGITS = 20
_DIGITS = frozenset(b"0123456789")
_QUOTE, _BACKSLASH = b'"\\'
# Rules in Lark that begin so make JSON and markers, and no text beside it.
JSON_BEGIN = "%llguidance {}\nstart: values"


def is_of_json(grammar: str) -> bool:
    """Whether what a grammar allows is JSON: json_grammar wrote it, or it is of such rules."""
    return grammar.startswith(('{"grammars":[{"name":"json_schema"', JSON_BEGIN))


class DigitTokens:
    """The bytes of a vocabulary's tokens, and which of them go on with a number."""

    def __init__(self, tokens: Sequence[bytes], num_words: int) -> None:
        """num_words: of a bit mask over the vocabulary, 32 tokens each."""
        self.tokens = tokens
        bits = np.zeros(32 * num_words, dtype=np.uint8)
        bits[[token_id for token_id, text in enumerate(tokens) if text[:1].isdigit()]] = 1
        self.others = ~np.packbits(bits, bitorder="little").view(np.int32)


class NumberLimit:
    """Counts the digits in a row, outside of strings, of one JSON text that grows by tokens."""

    def __init__(self, digits: DigitTokens) -> None:
        self._digits = digits
        # After each token: digits in a row (-1: in a string), and whether a backslash waits for what it escapes.
        self._states = [(0, False)]

    def narrow(self, mask: NDArray[np.int32]) -> None:
        """Take the tokens that begin with a digit out of a bit mask, if the number is long and may end here."""
        if self._states[-1][0] >= MAX_DIGITS:
            narrowed = mask & self._digits.others
            if narrowed.any():
                mask[:] = narrowed

    def advance(self, token_id: int) -> None:
        run, escaped = self._states[-1]
        for byte in self._digits.tokens[token_id]:
            if run >= 0:
                run = -1 if byte == _QUOTE else run + 1 if byte in _DIGITS else 0
            elif escaped:
                escaped = False
            elif byte == _BACKSLASH:
                escaped = True
            elif byte == _QUOTE:
                run = 0
        self._states.append((run, escaped))

    def go_back(self, num_tokens: int) -> None:
        del self._states[len(self._states) - num_tokens :]
