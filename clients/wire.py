"""The wire of an OpenAI-compatible server as a client sees it: the events of an answer, and what went wrong.

Pure: shared by the terminal chat (sync) and the load generator (async). Connections are in connection.py.
Knows nothing of the server's insides; must not import hamburger.server, engine or model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

_MAX_MESSAGE_CHARS = 300
_MOST_TOKENS = 2**53  # that any count of a server can be; beyond it floats are no longer exact
_COUNTS = ("prompt_tokens", "completion_tokens", "kv_slots", "macro_steps")  # of a usage
_T = TypeVar("_T")


class RequestError(Exception):
    """One request that failed.

    `reason` is short and equal for equal causes, so that failures can be counted by it; `str(error)` adds the remedy.
    What a server says reaches the terminal by it, so control characters are left out.
    `status` is the HTTP status where that is what failed.
    """

    def __init__(self, reason: str, remedy: str = "", status: int | None = None) -> None:
        self.status, self.remedy = status, remedy
        words = "".join(c for c in reason if c.isprintable() or c.isspace()).split()
        self.reason = " ".join(words)[:_MAX_MESSAGE_CHARS]
        super().__init__(f"{self.reason.rstrip('.')}. {remedy}" if remedy else self.reason)


class LostAnswer(RequestError):
    """The answer to one request did not come, though it was asked for again: that of another may."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's own counts for one request; None where it does not say."""

    prompt_tokens: int | None
    completion_tokens: int | None
    kv_slots: int | None
    macro_steps: int | None = None
    cached_tokens: int | None = None  # of the prompt, which a prefix cache had


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a streamed answer. `token_ids` and `group_index` are None unless the server reports groups.

    num_drafted: tokens that were drafted for the group, None where nothing was; the first num_accepted are in it.
    thought: what the model writes for itself, which is none of the answer's text.
    """

    text: str = ""
    token_ids: list[int] | None = None
    group_index: int | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    num_drafted: int | None = None
    num_accepted: int = 0
    thought: str = ""

    @property
    def carries_output(self) -> bool:
        """Whether this event brings something of the answer; a role or a usage alone does not."""
        return bool(self.text or self.thought or self.token_ids or self.finish_reason)


class StreamDecoder:
    """Bytes of one server-sent-events answer -> its events.

    Lines are cut at the byte `\\n` before anything is decoded, so a character that is split between two network chunks
    stays whole. Every `data:` line is one event, as all OpenAI-compatible servers send them, and a failure behind
    `event: error`; other lines (comments, pings) are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False  # the answer is whole: what comes behind it, if anything, says nothing
        self._is_error = False  # what the next `data:` line tells of
        self._finished = False
        self._has_output = False

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """The events that `chunk` completes. Raises RequestError for an error event or one that makes no sense."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
            if not line.startswith(b"data:") or self.is_done:
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.is_done = True
            elif payload:
                event = _parse_event(payload, self._is_error)
                self._finished |= event.finish_reason is not None
                self._has_output |= event.carries_output
                events.append(event)
        return events

    def close(self) -> list[StreamEvent]:
        """The events left at the end of the connection. Raises RequestError if the answer broke off."""
        events = self.feed(b"\n")
        if not self.is_done and not self._finished:
            raise RequestError("the stream ended before the answer did")
        if not self._has_output:  # not even a reason why
            raise RequestError("the answer has no tokens")
        return events


def token_count(value: Any) -> int | None:
    """A server's count of tokens or the like, None where it sent none. Raises TypeError for what is no such number."""
    if type(value) is float and value.is_integer():  # servers whose language has no whole numbers
        value = int(value)
    if value is not None and (type(value) is not int or not 0 <= value < _MOST_TOKENS):
        raise TypeError("no count")
    return value


def _typed(value: Any, kind: type[_T]) -> _T | None:
    """A value of a server's JSON, None where it sent none. Raises TypeError for one of another type."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"no {kind.__name__}")
    return value


def _parse_event(payload: bytes, is_error: bool) -> StreamEvent:
    """One `data:` payload of a chat or text completion. Raises RequestError, also for values of a wrong type."""
    try:
        body = json.loads(payload)
        # Servers tell of errors in three ways: {"error": ...}, the error itself, and that as an event of its own name.
        if error := body if is_error or body.get("object") == "error" else body.get("error"):
            raise RequestError(f"error in the stream: {error_message(error)}")
        usage = _usage(counts) if (counts := body.get("usage")) else None
        if not body.get("choices"):
            return StreamEvent(usage=usage)
        choice = body["choices"][0]
        delta = choice.get("delta") or {}
        group = choice.get("group") or {}
        drafted = _typed(group.get("drafted"), list)
        return StreamEvent(
            _typed(choice.get("text"), str) or _typed(delta.get("content"), str) or "",
            _typed(group.get("token_ids"), list),
            token_count(group.get("index")),
            _typed(choice.get("finish_reason"), str),
            usage,
            None if drafted is None else len(drafted),
            token_count(group.get("accepted")) or 0,
            # DeepSeek's name, which ours is, and that of OpenRouter, Ollama and newer vLLM.
            _typed(delta.get("reasoning_content"), str) or _typed(delta.get("reasoning"), str) or "",
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        shown = payload[:80].decode(errors="replace")
        raise RequestError(f"the stream holds an event that makes no sense: {shown}") from None


def error_message(body: Any) -> Any:
    """What the JSON of an error says, which servers nest in `error` or not."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return error.get("message", error) if isinstance(error, dict) else error


def _usage(counts: dict[str, Any]) -> Usage:
    details = counts.get("prompt_tokens_details") or {}
    named = {name: token_count(counts.get(name)) for name in _COUNTS}
    return Usage(**named, cached_tokens=token_count(details.get("cached_tokens")))
