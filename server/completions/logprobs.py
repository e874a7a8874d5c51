"""Log-probabilities in the two shapes that OpenAI clients read: one entry a token, whatever the groups were."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from hamburger.engine.request import RequestUpdate
from hamburger.engine.types.messages import TokenLogprobs
from hamburger.server.completions.echo import Echo, chars_before
from hamburger.server.server_tokenizer import ServerTokenizer

LOWEST_LOGPROB = -9999.0


class ChatLogprobs:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}"""

    def __init__(self, tokenizer: ServerTokenizer, *, as_ids: bool) -> None:
        """as_ids: tokens are named `token_id:N`."""
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def __call__(self, update: RequestUpdate) -> dict[str, Any]:
        content = []
        for token_id, entry in _entries(update):
            top = [self._entry(rival, logprob) for rival, logprob in entry.top]
            content.append(self._entry(token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        text = _id_text(token_id) if self._as_ids else data.decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


class TextOffsets:
    """The character of an answer's text at which each of its tokens starts; of one that continues a character, which is
    whole with a later token, that character's.

    num_chars: complete so far. goes_on: as in GenerationRequest.
    """

    def __init__(self, tokenizer: ServerTokenizer, *, skip_special_tokens: bool, goes_on: bool = False) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = not goes_on
        self.num_chars = 0

    def next(self, token_id: int) -> int:
        start = self.num_chars
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return start
        data = self._tokenizer.token_bytes(token_id, first=self._is_first)
        self._is_first = self._is_first and not self._tokenizer.token_bytes(token_id)
        start += chars_before(self._utf8, data)
        self.num_chars += len(self._utf8.decode(data))
        return start


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}: parallel lists. One instance follows one answer.

    text_offset: the character of the choice's text at which the token starts (TextOffsets). echo: the prompt whose
    tokens come first; nothing predicts its first one, so that one's log-probabilities are null. as_ids: tokens are
    named `token_id:N`. num_top: most rivals that are told.
    """

    def __init__(
        self,
        tokenizer: ServerTokenizer,
        skip_special_tokens: bool,
        echo: Echo | None = None,
        *,
        as_ids: bool = False,
        num_top: int | None = None,
    ) -> None:
        self._tokenizer, self._as_ids, self._num_top = tokenizer, as_ids, num_top
        self._echo = echo
        self._offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens, goes_on=True)

    def __call__(self, update: RequestUpdate) -> dict[str, Any]:
        echo = self._echo
        if echo is None or update.prompt_logprobs is None:
            return self._answer(update)
        self._offsets.num_chars = len(echo.text)
        if echo.logprobs is None:
            entries = zip(echo.token_ids, update.prompt_logprobs, strict=True)
            echo.logprobs = self._lists(entries, echo.offsets())
        return join_completion_logprobs([echo.logprobs, self._answer(update)])

    def _answer(self, update: RequestUpdate) -> dict[str, Any]:
        return self._lists(_entries(update), [self._offsets.next(token_id) for token_id in update.token_ids])

    def _lists(self, entries: Iterable[tuple[int, TokenLogprobs | None]], text_offset: list[int]) -> dict[str, Any]:
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token_id, entry in entries:
            text = self._text(token_id)
            tokens.append(text)
            token_logprobs.append(None if entry is None else finite(entry.logprob))
            top_logprobs.append(None if entry is None else self._top(text, entry))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }

    def _top(self, text: str, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for rival, logprob in entry.top[: self._num_top]:
            top.setdefault(self._text(rival), finite(logprob))  # best first: it keeps a text two ids share
        # The token itself is always there, and with the same float: clients compare the two.
        return top | {text: finite(entry.logprob)}

    def _text(self, token_id: int) -> str:
        """A token that is not whole UTF-8 is written `bytes:\\xe2\\x80`, as OpenAI does, so that it stays distinct."""
        if self._as_ids:
            return _id_text(token_id)
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class PromptLogprobs:
    """vLLM's `prompt_logprobs` of one prompt: null for its first token, for each other one
    {token id: {"logprob", "rank", "decoded_token"}}, of the token itself and of its likeliest rivals."""

    def __init__(self, tokenizer: ServerTokenizer, token_ids: list[int], num_top: int) -> None:
        self._tokenizer, self._token_ids, self._num_top = tokenizer, token_ids, num_top
        self.written: list[dict[str, Any] | None] | None = None  # made once for all answers to the prompt

    def add(self, update: RequestUpdate) -> None:
        if self.written is None and update.prompt_logprobs is not None:
            pairs = zip(self._token_ids, update.prompt_logprobs, strict=True)
            self.written = [None if entry is None else self._of_token(token_id, entry) for token_id, entry in pairs]

    def _of_token(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        found = {str(token_id): self._entry(token_id, entry.logprob, entry.rank)}
        for rank, (rival, logprob) in enumerate(entry.top[: self._num_top], start=1):
            found.setdefault(str(rival), self._entry(rival, logprob, rank))
        return found

    def _entry(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


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


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _entries(update: RequestUpdate) -> Iterable[tuple[int, TokenLogprobs]]:
    return zip(update.token_ids, update.logprobs or [], strict=True)
