"""What `echo` gives back: a prompt's text, and where in it each of its tokens starts. It knows no JSON."""

from __future__ import annotations

import codecs
from functools import cached_property
from typing import Any

from hamburger.server.server_tokenizer import ServerTokenizer


def chars_before(utf8: codecs.IncrementalDecoder, data: bytes) -> int:
    """1 where the decoder holds the beginning of a character that a token's bytes do not go on: what stands for it in
    the text comes before the token. Else 0."""
    pending = utf8.getstate()[0]
    return len((pending + data[:1]).decode(errors="replace")) - 1 if pending and data else 0


class Echo:
    """One prompt, to be put before its answers."""

    def __init__(self, tokenizer: ServerTokenizer, token_ids: list[int], written: str | None) -> None:
        """written: the prompt as the client wrote it; None where it sent token ids."""
        self.token_ids = token_ids
        self.logprobs: dict[str, Any] | None = None  # as they are written: made once for all answers to the prompt
        self._tokenizer = tokenizer
        self._written = written

    @cached_property
    def text(self) -> str:
        """What the client wrote; of token ids, their text with the special tokens in it.

        It is made when first asked for: by then the engine has checked the ids.
        """
        if self._written is not None:
            return self._written
        return self._tokenizer.decode(self.token_ids, skip_special_tokens=False)

    def offsets(self) -> list[int]:
        """The character of `text` at which each token starts; one that continues a character has that one's offset.

        A special token that is not written in the text (such as a BOS that the tokenizer put before it) takes none of
        it. Where the tokenizer changed the text (as Unicode normalization does) the offsets are as near.
        """
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        offsets = []
        at, first = 0, True
        for token_id in self.token_ids:
            data = self._tokenizer.token_bytes(token_id, first=first)
            offsets.append(min(at + chars_before(utf8, data), len(self.text)))
            if self._tokenizer.is_special(token_id) and not self.text.startswith(data.decode(errors="replace"), at):
                continue
            at += len(utf8.decode(data))
            first = first and not self._tokenizer.token_bytes(token_id)
        return offsets
