"""The wire of an OpenAI-compatible server as a client sees it: addresses, request options, events, errors.

Shared by the terminal chat (sync) and the load generator (async), so everything but `first_model` is pure.
Knows HTTP, and nothing of the server's insides; must not import hamburger.server, engine or model.
"""

from __future__ import annotations

import errno
import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.request import getproxies

import httpx

API_KEY_VARIABLE = "HAMBURGER_API_KEY"
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_MAX_MESSAGE_CHARS = 300
_MOST_TOKENS = 2**53  # that any count of a server can be; beyond it floats are no longer exact
_T = TypeVar("_T")


class RequestError(Exception):
    """One request that failed.

    `reason` is short and equal for equal causes, so that failures can be counted by it; `str(error)` adds the remedy.
    What a server says reaches the terminal by it, so control characters are left out.
    `status` is the HTTP status where that is what failed.
    """

    def __init__(self, reason: str, remedy: str = "", status: int | None = None) -> None:
        self.status = status
        words = "".join(c for c in reason if c.isprintable() or c.isspace()).split()
        self.reason = " ".join(words)[:_MAX_MESSAGE_CHARS]
        super().__init__(f"{self.reason.rstrip('.')}. {remedy}" if remedy else self.reason)


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's own counts for one request; None where it does not say."""

    prompt_tokens: int | None
    completion_tokens: int | None
    kv_slots: int | None
    macro_steps: int | None = None


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
    stays whole. Every `data:` line is one event, as all OpenAI-compatible servers send them; other lines (comments,
    pings, `event:`) are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._done = False
        self._finished = False

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """The events that `chunk` completes. Raises RequestError for an error event or one that makes no sense."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if not line.startswith(b"data:") or self._done:
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._done = True
            elif payload:
                event = _parse_event(payload)
                self._finished |= event.finish_reason is not None
                events.append(event)
        return events

    def close(self) -> list[StreamEvent]:
        """The events left at the end of the connection. Raises RequestError if the answer broke off."""
        events = self.feed(b"\n")
        if not self._done and not self._finished:
            raise RequestError("the stream ended before the answer did")
        return events


def client_options(url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """Keyword arguments for httpx.Client or httpx.AsyncClient. `timeout`: the longest silence, in seconds.

    Raises ValueError where SSL_CERT_FILE or SSL_CERT_DIR, which HTTPS needs, cannot be read, where the key of the
    environment cannot be sent, or where its proxies are none.
    """
    of_environment = os.environ.get(API_KEY_VARIABLE, "").split(",")[0].strip()  # a server's list of keys: any will do
    key = api_key or check_key(of_environment, f"the environment variable {API_KEY_VARIABLE}")
    headers = {"Accept-Encoding": "identity"}  # compressed events would wait in a buffer
    if key:
        headers["Authorization"] = f"Bearer {key}"
    takes_proxies = httpx.URL(url).host not in _LOOPBACK_HOSTS  # a proxy cannot reach this machine's loopback
    if takes_proxies:
        _check_proxies()
    return {
        "base_url": url,
        "headers": headers,
        "timeout": httpx.Timeout(timeout, connect=min(timeout, 10.0)),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
        "trust_env": takes_proxies,
        # SSL_CERT_FILE counts there all the same: it is where a server has a certificate that it signed itself.
        "verify": _trusted() if httpx.URL(url).scheme == "https" else True,
    }


def check_key(key: str, name: str = "the key") -> str:
    """The key, if an HTTP header can carry it. Raises ValueError with its name, never the key itself."""
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise ValueError(
            f"{name} holds what an HTTP header cannot carry: a key is ASCII, on one line, without spaces around it."
        )
    return key


def _check_proxies() -> None:
    """As httpx reads them, which refuses them with a traceback."""
    for scheme, proxy in getproxies().items():
        if scheme in ("http", "https", "all") and proxy:
            variable = f"the environment variable {scheme}_proxy"
            try:
                found = httpx.Proxy(proxy if "://" in proxy else f"http://{proxy}")
            except (ValueError, httpx.InvalidURL) as error:
                raise ValueError(f"{variable} names no proxy ({error}): mend it, or unset it.") from None
            if found.url.scheme.startswith("socks") and find_spec("socksio") is None:
                raise ValueError(f"{variable} names a SOCKS proxy: install the package socksio for it, or unset it.")


def _trusted() -> ssl.SSLContext:
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        named = " or ".join(name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name))
        raise ValueError(f"{named} names no certificates that can be read ({error}): mend it, or unset it.") from error


def first_model(client: httpx.Client) -> str:
    """The first model that the server lists. Raises RequestError."""
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise transport_error(error, client.base_url) from error
    if response.is_error:
        raise response_error(response)
    try:
        name = str(response.json()["data"][0]["id"])
        if not name.isprintable():  # it is shown, and sent
            raise ValueError
        return name
    except (ValueError, LookupError, TypeError):
        raise RequestError(f"{response.url} lists no model", "Name one with --model.") from None


def check_stream(response: httpx.Response) -> None:
    """Raise RequestError unless a stream of events follows. An error's body must have been read."""
    if response.is_error:
        raise response_error(response)
    content_type = response.headers.get("content-type", "none")
    if not content_type.startswith("text/event-stream"):
        raise RequestError(
            f"{response.url} did not answer with a stream (content-type {content_type})",
            "Is --url an OpenAI-compatible server?",
        )


def response_error(response: httpx.Response) -> RequestError:
    """An HTTP error (its body read) as a RequestError with the server's own message."""
    status = response.status_code
    try:
        body = response.json()
        message = body.get("error", body)
        message = message.get("message", message) if isinstance(message, dict) else message
    except (ValueError, AttributeError):
        message = response.text or response.reason_phrase
    remedies = {
        401: f"Give the server's key with --api-key or {API_KEY_VARIABLE}.",
        404: "See /v1/models for what is served, and choose with --model or --url.",
        429: "The server's queue is full: try again later, or send less at a time.",
        503: "The server is loading, draining or overloaded: try again later.",
    }
    return RequestError(f"HTTP {status}: {message}", remedies.get(status, ""), status)


def transport_error(error: httpx.HTTPError, url: httpx.URL) -> RequestError:
    """A failure below HTTP as a RequestError."""
    root = str(url).rstrip("/")
    causes = list(_causes(error))  # httpx tells of them and of a closed port alike
    if any(isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE) for cause in causes):
        return RequestError("too many open files: lower --concurrency or raise `ulimit -n`")
    fault = next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None)
    if isinstance(fault, ssl.SSLCertVerificationError):
        return RequestError(
            f"the certificate of {root} is not trusted ({fault.verify_message})",
            "Name its file, or that of who signed it, in the environment variable SSL_CERT_FILE.",
        )
    if fault is not None:
        return RequestError(f"no HTTPS with {root} ({fault.reason})", "Is its --url one that begins with http://?")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return RequestError(
            f"cannot connect to {root}", "Is the server running? Start one with `hamburger serve`, or give its --url."
        )
    if isinstance(error, httpx.RemoteProtocolError) and url.scheme == "http" and "message body" not in str(error):
        return RequestError(
            f"{root} ended the connection without an answer in HTTP",
            "Is its --url one that begins with https://? Else the server has ended: see its log.",
        )
    if isinstance(error, httpx.TimeoutException):
        return RequestError(f"{root} fell silent for too long ({type(error).__name__})")
    return RequestError(f"the connection to {root} failed ({type(error).__name__})")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """A failure, and what it came of; where several addresses were tried, the failure of each."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__


def token_count(value: Any) -> int | None:
    """A server's count of tokens or the like, None where it sent none. Raises TypeError for what is no such number."""
    if value is not None and (type(value) is not int or not 0 <= value < _MOST_TOKENS):
        raise TypeError("no count")
    return value


def _typed(value: Any, kind: type[_T]) -> _T | None:
    """A value of a server's JSON, None where it sent none. Raises TypeError for one of another type."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"no {kind.__name__}")
    return value


def _parse_event(payload: bytes) -> StreamEvent:
    """One `data:` payload of a chat or text completion. Raises RequestError, also for values of a wrong type."""
    try:
        body = json.loads(payload)
        if error := body.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            raise RequestError(f"error in the stream: {message}")
        counts = body.get("usage")
        usage = None
        if counts:
            usage = Usage(**{field.name: token_count(counts.get(field.name)) for field in fields(Usage)})
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
            _typed(delta.get("reasoning_content"), str) or "",
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        shown = payload[:80].decode(errors="replace")
        raise RequestError(f"the stream holds an event that makes no sense: {shown}") from None
