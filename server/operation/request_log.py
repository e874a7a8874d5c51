"""One line of the log for each request: what it asked for in counts, how it went and how long it took. Never its text.

The middleware opens an entry and writes it; whoever learns something on the way notes it there. docs/operations.md
explains the fields; a test compares.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from starlette.types import Scope

request_logger = logging.getLogger("hamburger.request")

CLIENT_LEFT = 499  # no status of HTTP's: the client went away before it could be answered
FIELDS = (
    "request_id", "answer_id", "client", "key", "method", "path", "status", "model", "stream", "choices",
    "prompt_tokens", "completion_tokens", "kv_slots", "tokens_per_kv", "macro_steps", "tokens_per_step",
    "drafted_tokens", "accepted_tokens", "cached_tokens", "finish_reason", "error", "param",
    "client_left", "queue_seconds", "ttft_seconds", "seconds", "bytes",
)  # fmt: skip
# Probes and scrapes come every few seconds: logged only at log_level debug, unless they fail.
PROBES = frozenset(["/health", "/ready", "/metrics"])
_KEY = "hamburger.request"
_CUT = "hamburger.cut"  # in a scope
_MOST_CHARACTERS = 128  # of what a client wrote


class Failure(Protocol):
    """The part of an ApiError that is logged: its message may quote the client."""

    status: int
    param: str | None
    code: str | None


class Moments(NamedTuple):
    """When an answer reached the engine, and its first choice had slots and its first group; time.monotonic() seconds,
    None where it never got that far."""

    arrival: float
    scheduled: float | None
    first_token: float | None


@dataclass(slots=True)
class RequestEntry:
    """What is known of a request so far. `counts` and `moments` are called when it has ended, for what only is known
    then; moments is None where it asks nothing of an engine. goes_on: it was answered before its work was done."""

    request_id: str
    status: int = CLIENT_LEFT
    bytes: int = 0
    key: str | None = None
    model: str | None = None
    stream: bool | None = None
    has_ended: bool = False  # its whole answer was handed over
    client_left: bool = False
    failure: Failure | None = None
    counts: list[Callable[[], Mapping[str, Any]]] = field(default_factory=list)
    moments: Callable[[], Moments] | None = None
    goes_on: asyncio.Task[None] | None = None
    started: float = field(default_factory=time.monotonic)  # time.monotonic() seconds

    def asked_for(self, model: str | None, stream: bool) -> None:
        self.model, self.stream = model, stream

    def failed(self, failure: Failure) -> None:
        """It was answered with an error, or its stream ended with one."""
        self.failure = failure


def open_entry(scope: Scope, request_id: str) -> RequestEntry:
    entry: RequestEntry = scope.setdefault(_KEY, RequestEntry(request_id))
    return entry


def entry_of(scope: Scope) -> RequestEntry:
    """The entry that the middleware opened; where it is not (the router before replicas), one that nobody writes."""
    return open_entry(scope, "")


def note_cut(scope: Scope, status: int) -> None:
    """The server ends this request's connection, for what `status` says: to the application it looks as if the client
    had left."""
    scope[_CUT] = int(status)


def write_entry(entry: RequestEntry, scope: Scope) -> None:
    """Log a request that has ended."""
    is_quiet_probe = scope["path"] in PROBES and entry.status < 400
    level = logging.DEBUG if is_quiet_probe else logging.INFO
    if request_logger.isEnabledFor(level):
        request_logger.log(level, "request", extra={"fields": fields_of(entry, scope)})


def fields_of(entry: RequestEntry, scope: Scope) -> dict[str, Any]:
    """What is known of a request that has ended, by FIELDS; None where it is not."""
    client = scope.get("client")
    values: dict[str, Any] = {
        "request_id": entry.request_id,
        "client": client[0] if client else None,
        "key": entry.key,
        "method": scope["method"][:_MOST_CHARACTERS],
        "path": scope["path"][:_MOST_CHARACTERS],
        "status": entry.status,
        "model": entry.model and entry.model[:_MOST_CHARACTERS],
        "stream": entry.stream,
        "client_left": entry.client_left or entry.status == CLIENT_LEFT,
        "seconds": round(time.monotonic() - entry.started, 4),
        "bytes": entry.bytes,
    }
    for count in entry.counts:
        values |= count()
    if entry.failure is not None:
        values |= {"error": entry.failure.code or f"http_{entry.failure.status}", "param": entry.failure.param}
        if values.get("finish_reason") == "abort" and entry.failure.status != CLIENT_LEFT:
            values["finish_reason"] = "error"
    if (cut := scope.get(_CUT)) is not None:
        values |= {"error": f"http_{cut}", "client_left": False}
        if entry.status == CLIENT_LEFT:  # no answer had begun
            values["status"] = cut
    return {name: values.get(name) for name in FIELDS}
