"""Every error that the engine raises on purpose, as one tree.

HamburgerError
├── InvalidRequest(param)       the request can never succeed: HTTP 400
│   ├── PromptTooLong           the prompt alone exceeds the context
│   ├── ContextOverflow         prompt + max_tokens exceed the context
│   ├── NeverFits               more slots than the whole KV pool holds
│   └── UnknownAdapter          it names a LoRA adapter that is not loaded: HTTP 404
├── Overloaded(retry_after)     try again later
│   ├── QueueFull               the waiting queue is at its bound: HTTP 429
│   ├── QueueTimeout            it waited longer than max_queue_seconds: HTTP 503
│   └── OutOfMemory             the device has no memory left for its step: HTTP 503
├── TokenizerError              a text, chat or tokenizer file that the tokenizer cannot take; also a ValueError
└── EngineUnavailable           nothing can be served: HTTP 503
    ├── EngineDraining          it is shutting down
    └── EngineDead              the engine loop ended with an exception
"""

from __future__ import annotations

_MOST_SHOWN = 128  # characters


def cut(text: str) -> str:
    """What a client sent, as an error may repeat it: its end is left out where it is long."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text):,} characters)"


def shown(value: object) -> str:
    """The same of any value, quoted."""
    return cut(repr(value))


class HamburgerError(Exception):
    """Base of all errors raised on purpose; `str(error)` is fit for the user."""


class InvalidRequest(HamburgerError):
    """A request that can never succeed. `param` is the OpenAI name of the field at fault, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt has more tokens than the context holds."""


class ContextOverflow(InvalidRequest):
    """The prompt fits, but prompt + max_tokens does not."""


class NeverFits(InvalidRequest):
    """The request could need more slots than the KV pool has."""


class UnknownAdapter(InvalidRequest):
    """The request names a LoRA adapter that is not loaded, or no more."""


class Overloaded(HamburgerError):
    """The server has too much to do. `retry_after` is a whole number of seconds, at least 1."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = max(1, retry_after)


class QueueFull(Overloaded):
    """The waiting queue is at its bound."""


class RateLimited(Overloaded):
    """A client has reached a limit of its own."""


class QueueTimeout(Overloaded):
    """The request waited longer than the longest allowed time."""


class OutOfMemory(Overloaded):
    """The device ran out of memory in a step; of one request: even in a step of its own."""


class TokenizerError(HamburgerError, ValueError):
    """The tokenizer cannot load its files, encode a text or render a chat; the message says why and what to do."""


class EngineUnavailable(HamburgerError):
    """Nothing can be served now."""


class EngineDraining(EngineUnavailable):
    """The engine takes no new work because it is shutting down."""


class EngineDead(EngineUnavailable):
    """The engine loop ended with an exception; the message names it."""
