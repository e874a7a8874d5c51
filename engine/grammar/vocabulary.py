"""Vocabulary: what a grammar reads of a tokenizer: every token's bytes, and a text as the tokens that add just it.

Where a grammar leaves one way to go on, the library asks for its tokens, and the first of them is all that may come. So
they must be those of a piece of a text, whatever stands before it: many tokenizers put a space before a text, take
what is written as a special token for it, or change characters.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

_MOST_CHARACTERS = 1000


class GrammarTokenizer(Protocol):
    """What grammars need of a Tokenizer."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...
    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class Vocabulary:
    """As LLTokenizer reads it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos_token_id: int) -> None:
        """vocab_size: the model's, which may be padded beyond the tokenizer's."""
        size = min(vocab_size, tokenizer.vocab_size)
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        # The library's masks have a bit for each of these: what only pads the model's vocabulary has no bytes, and is
        # never allowed.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)] + [b""] * (vocab_size - size)
        self.special_token_ids = [token_id for token_id in range(size) if tokenizer.is_special(token_id)]
        self._tokenizer = tokenizer

    def __call__(self, data: bytes | str) -> list[int]:
        """Of a long text those of its beginning: it is asked for again at each token, which takes the first ones."""
        text = (data if isinstance(data, str) else data.decode(errors="replace"))[:_MOST_CHARACTERS]
        spelt = text.encode()
        for before in ("", "\n"):  # behind a line break, that takes the space
            found = self._last(self._tokenizer.encode(before + text), spelt)
            if found is not None:
                return found
        return self._longest(spelt)

    def _last(self, token_ids: list[int], spelt: bytes) -> list[int] | None:
        """The last of these tokens, which add just these bytes, without special ones and those that the model lacks.
        None where no number of them does."""
        found: list[int] = []  # from the last one on
        size = len(spelt)
        for token_id in reversed(token_ids):
            if size <= 0:
                break
            token = self._tokenizer.token_bytes(token_id)
            is_plain = token_id < len(self.tokens) and not self._tokenizer.is_special(token_id)
            found += [token_id] if is_plain else reversed(self._longest(token))
            size -= len(token)
        found.reverse()
        return found if b"".join(self.tokens[token_id] for token_id in found) == spelt else None

    def _longest(self, spelt: bytes) -> list[int]:
        """At each place the longest token that fits: not what a model would write, but these bytes. What no token is
        ends it."""
        found: list[int] = []
        at = 0
        while at < len(spelt):
            sizes = range(min(self._most_bytes, len(spelt) - at), 0, -1)
            token_id = next((i for size in sizes if (i := self._ids.get(spelt[at : at + size])) is not None), None)
            if token_id is None:
                break
            found.append(token_id)
            at += len(self.tokens[token_id])
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """By their bytes, without special ones. Of two that are one character, that which is not called a byte."""
        special = {*self.special_token_ids}
        return {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    @cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self._ids), default=0)
