"""Log-probabilities in the two shapes that OpenAI clients read: one entry a token, whatever the groups were."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hamburger.engine.client import RequestUpdate
from hamburger.engine.messages import TokenLogprobs
from hamburger.server.context import ServerTokenizer

LOWEST_LOGPROB = -9999.0


class ChatLogprobs:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}"""

    def __init__(self, tokenizer: ServerTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, update: RequestUpdate) -> dict[str, Any]:
        content = []
        for token_id, entry in _entries(update):
            top = [self._entry(rival, logprob) for rival, logprob in entry.top]
            content.append(self._entry(token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}: parallel lists. One instance follows one answer.

    text_offset: the character of the answer's text at which the token starts; a token that continues a character has
    that character's offset.
    """

    def __init__(self, tokenizer: ServerTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._num_chars = 0  # begun so far

    def __call__(self, update: RequestUpdate) -> dict[str, Any]:
        tokens, token_logprobs, top_logprobs, text_offset = [], [], [], []
        for token_id, entry in _entries(update):
            text, logprob = self._text(token_id), finite(entry.logprob)
            tokens.append(text)
            token_logprobs.append(logprob)
            top: dict[str, float] = {}
            for rival, rival_logprob in entry.top:
                top.setdefault(self._text(rival), finite(rival_logprob))  # best first: it keeps a text two ids share
            # The token itself is always there, and with the same float: clients compare the two.
            top_logprobs.append(top | {text: logprob})
            text_offset.append(self._advance(token_id))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }

    def _text(self, token_id: int) -> str:
        """A token that is not whole UTF-8 is written `bytes:\\xe2\\x80`, as OpenAI does, so that it stays distinct."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _advance(self, token_id: int) -> int:
        start = self._num_chars
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return start
        data = self._tokenizer.token_bytes(token_id)
        self._num_chars += sum(not _continues(byte) for byte in data)
        return start - 1 if start and data and _continues(data[0]) else start


def join_completion_logprobs(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            joined[name] += values
    return joined


def join_chat_logprobs(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"content": [entry for part in parts for entry in part["content"]], "refusal": None}


def finite(logprob: float) -> float:
    """JSON has no NaN and no infinity; a NaN fails the comparison and is clamped too."""
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


def _entries(update: RequestUpdate) -> Iterable[tuple[int, TokenLogprobs]]:
    return zip(update.token_ids, update.logprobs or [], strict=True)


def _continues(byte: int) -> bool:
    """Whether a UTF-8 byte goes on with the character before it."""
    return byte & 0xC0 == 0x80
