"""Token ids -> text that can be shown as it comes, cut at the earliest stop string. Each request has its own.

It works token by token, so that where groups are split never changes the text or the token count. It must not know
requests, slots or HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from hamburger.engine.text.stop_strings import StopStrings


class TextDecoder(Protocol):
    """The least that a tokenizer must do here. Later tokens must not change the text of complete characters."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@runtime_checkable
class ByteDecoder(Protocol):
    """Also gives bytes. Where streams_bytes is true, `decode` is the UTF-8 text of all the tokens' bytes joined."""

    streams_bytes: bool

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class DetokenizedGroup(NamedTuple):
    """What one group adds to the text.

    text: new text that can no longer change. num_tokens: the group's tokens up to and with the one that completes a
    stop string; all of them without one. stop: that stop string.
    """

    text: str
    num_tokens: int
    stop: str | None


class Detokenizer:
    """The text of one answer, group by group.

    All texts together are `decode` of the counted tokens without the end or stop token that ended them, or cut before
    the stop string that did (with shows_stop: with that token, or behind that string). Held back are only an incomplete
    character and the longest end of the text that a stop string begins with.

    Of several stop strings, the one that is completed by the earliest token wins; within one token the one that ends
    first, then the longest. One that is completed by the answer's token number i (from 0) is ignored while
    i < min_tokens, as end tokens are; it may begin in that part and be completed later. Bytes that are still
    incomplete when the answer ends become U+FFFD, as part of the last token's text.

    goes_on: its text goes on with a prompt's, so that it keeps a space which some tokenizers cut where a text begins.
    """

    def __init__(
        self,
        tokenizer: TextDecoder,
        *,
        stop: StopStrings | None = None,
        shows_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        goes_on: bool = False,
    ) -> None:
        self._stream: _ByteStream | _WindowStream
        if isinstance(tokenizer, ByteDecoder) and tokenizer.streams_bytes:
            self._stream = _ByteStream(tokenizer, skip_special_tokens, first=not goes_on)
        else:
            self._stream = _WindowStream(tokenizer, skip_special_tokens)
        self._stops, self._shows_stop, self._state = stop, shows_stop, 0
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pending = ""  # text not shown yet
        self._stop: str | None = None

    def push(self, token_ids: Sequence[int], *, last: bool = False, by_token: bool = False) -> DetokenizedGroup:
        """Take the next group. last: the answer ends with it; by_token: that is what its last token is for.

        After a stop nothing is taken: no text, 0 tokens.
        """
        if self._stop is not None:
            return DetokenizedGroup("", 0, self._stop)
        if by_token and not self._shows_stop:
            group = self.push(token_ids[:-1], last=last)
            return group if group.stop is not None else group._replace(num_tokens=len(token_ids))
        if self._stops is None:
            text = self._stream.add(token_ids)
            return DetokenizedGroup(text + self._stream.flush() if last else text, len(token_ids), None)
        counted = 0
        for token_id in token_ids:
            counted += 1
            self._num_tokens += 1
            self._take(self._stops, self._stream.add((token_id,)))
            if self._stop is not None:
                break
        if last and self._stop is None:
            self._take(self._stops, self._stream.flush())
        num_held_back = 0 if last or self._stop is not None else self._stops.held(self._state)
        end = len(self._pending) - num_held_back
        text, self._pending = self._pending[:end], self._pending[end:]
        return DetokenizedGroup(text, counted, self._stop)

    def _take(self, stops: StopStrings, new: str) -> None:
        """Add the latest token's text to the pending text; end that at a stop string which this text completes."""
        self._state, found = stops.feed(self._state, new)
        start = len(self._pending)
        self._pending += new
        if found is not None and self._num_tokens > self._min_tokens:
            end, length = found
            self._stop = self._pending[start + end - length : start + end]
            self._pending = self._pending[: start + end - (0 if self._shows_stop else length)]


class _ByteStream:
    """Exact: an incremental UTF-8 decoder over the tokens' bytes.

    Only a surrogate's encoding (ED A0..BF), which is never valid, it takes one byte later than it could.
    """

    def __init__(self, tokenizer: ByteDecoder, skip_special_tokens: bool, *, first: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = first

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is complete now and was not before."""
        data = b""
        for token_id in token_ids:
            if not (self._skip and self._tokenizer.is_special(token_id)):
                data += self._tokenizer.token_bytes(token_id, first=self._first)
                self._first = self._first and not self._tokenizer.token_bytes(token_id)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What an incomplete character at the end becomes."""
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For a tokenizer that only decodes: a window of tokens is decoded with and without the new ones.

    The window begins with tokens whose text is out already, so that what `decode` does at a text's start (such as to
    drop a space) is the same both times. Text that ends in U+FFFD may be an incomplete character, so it waits.
    """

    def __init__(self, tokenizer: TextDecoder, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._new: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        self._new.extend(token_ids)
        text = self._decode(self._context + self._new)
        if text.endswith("\ufffd") or len(text) <= len(self._context_text):
            return ""
        shown = len(self._context_text)
        self._context, self._new = self._new, []
        self._context_text = self._decode(self._context)
        return text[shown:]

    def flush(self) -> str:
        text = self._decode(self._context + self._new)
        return text[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
