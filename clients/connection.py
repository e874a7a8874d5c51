"""How a client reaches an OpenAI-compatible server: keys, proxies, certificates, and what an answer's status says.

Knows HTTP, and nothing of the server's insides; must not import hamburger.server, engine or model.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

from hamburger.clients.wire import LostAnswer, RequestError, error_message

API_KEY_VARIABLE = "HAMBURGER_API_KEY"
FULL = (429, 502, 503, 504)  # 502 and 504: a proxy has no answer of it
_LIST_SECONDS = 30.0  # in which a server that works lists its models
_LONGEST_PAUSE, _LONGEST_WAIT = 30.0, 900.0  # seconds between tries of a server that is full, and until the last


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
    takes_proxies = not _is_of_this_machine(httpx.URL(url).host)  # which a proxy cannot reach
    if takes_proxies:
        _check_proxies()
    return {
        "base_url": url,
        "headers": headers,
        "timeout": httpx.Timeout(timeout, connect=min(timeout, 10.0)),
        # Shorter than servers keep idle connections: one that is closed as a request is sent is a failure.
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        "trust_env": takes_proxies,
        # SSL_CERT_FILE counts there all the same: it is where a server has a certificate that it signed itself.
        "verify": _trusted() if takes_proxies or httpx.URL(url).scheme == "https" else _trusting_nobody(),
    }


class Clients:
    """HTTP clients of one connection each, made as they are needed.

    One client of many connections looks at all of them at each request and each answer's end: from some hundred on
    that takes longer than what is measured (512 answers of 1 s took it 10.6 s).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """options: client_options."""
        self._options = options
        self._free: list[httpx.AsyncClient] = []
        self._all = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncClient]:
        """One that nobody else uses meanwhile."""
        if self._free:
            client = self._free.pop()
        else:
            client = await self._all.enter_async_context(httpx.AsyncClient(**self._options))
        try:
            yield client
        finally:
            self._free.append(client)

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._all.aclose()


def _is_of_this_machine(host: str) -> bool:
    """Also 0.0.0.0, which servers print as where they listen."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


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


def _proxy_of(url: httpx.URL) -> str | None:
    """By which httpx reaches a server, without its password."""
    found = {} if _is_of_this_machine(url.host) or proxy_bypass(url.host) else getproxies()
    proxy = found.get(url.scheme) or found.get("all")
    return proxy and proxy.rsplit("@", 1)[-1]


def _trusting_nobody() -> ssl.SSLContext:
    """For who needs no certificates: to read those of the machine takes longer than a request."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _trusted() -> ssl.SSLContext:
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        named = " or ".join(name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name))
        raise ValueError(f"{named} names no certificates that can be read ({error}): mend it, or unset it.") from error


def first_model(client: httpx.Client) -> str:
    """The first model that the server lists. Raises RequestError."""
    try:
        response = client.get("/v1/models", timeout=_LIST_SECONDS)
    except httpx.HTTPError as error:
        raise transport_error(error, client.base_url) from error
    check_answer(response)
    try:
        name = str(response.json()["data"][0]["id"])
        if not name.isprintable():  # it is shown, and sent
            raise ValueError
        return name
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RequestError(f"{response.url} lists no model", "Name one with --model.") from None


async def patient_post(
    client: httpx.AsyncClient, path: str, body: bytes, has_answered: Callable[[], bool] | None = None
) -> httpx.Response:
    """What the server answers to a JSON body, of whatever status; tries again, up to 15 minutes, while it is full.

    has_answered: whether it has answered anything yet. Where it has, or does so now, a connection that ends, an answer
    that does not come and a server that cannot be reached any more are tried again as well, once at least.
    Raises RequestError where it does not answer, LostAnswer where that may be for this request's sake.
    """
    deadline = time.monotonic() + _LONGEST_WAIT
    attempt = 0
    while True:
        retry_after = ""
        try:
            response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            failure = transport_error(error, client.base_url)
            if has_answered is None or not _may_pass(error) or not (has_answered() or await _answers(client)):
                raise failure from error
            if attempt and time.monotonic() > deadline:
                is_gone = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                raise (failure if is_gone else LostAnswer(failure.reason, failure.remedy)) from error
        else:
            if response.status_code not in FULL or time.monotonic() > deadline:
                return response
            retry_after = response.headers.get("retry-after", "")
        await asyncio.sleep(_pause(retry_after, attempt))
        attempt += 1


def _may_pass(error: httpx.HTTPError) -> bool:
    """Whether the same request may find a better connection: the server was restarted, or a proxy cut this one."""
    if any(isinstance(cause, ssl.SSLError) or _is_of_files(cause) for cause in _causes(error)):
        return False
    return isinstance(error, httpx.NetworkError | httpx.TimeoutException | httpx.RemoteProtocolError)


def _is_of_files(cause: BaseException) -> bool:
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


async def _answers(client: httpx.AsyncClient) -> bool:
    """Whether it speaks HTTP, and lives."""
    try:
        await client.get("/v1/models", timeout=_LIST_SECONDS)
    except httpx.HTTPError:
        return False
    return True


def _pause(retry_after: str, attempt: int) -> float:
    """Seconds: what the server asks for, and about twice as long each time, at random, or all would come at once."""
    asked = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
    return min(max(asked, random.uniform(0.5, 1) * 2.0 ** min(attempt, 10)), _LONGEST_PAUSE)


def check_stream(response: httpx.Response) -> None:
    """Raise RequestError unless a stream of events follows. The body must have been read where none does."""
    check_answer(response)
    if not is_stream(response):
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            if error := response.json().get("error"):  # gateways tell of errors so, too
                raise RequestError(f"HTTP {response.status_code}: {error_message(error)}")
        content_type = response.headers.get("content-type", "none")
        raise RequestError(
            f"{response.url} did not answer with a stream (content-type {content_type})",
            "Is --url an OpenAI-compatible server?",
        )


def is_stream(response: httpx.Response) -> bool:
    """Whether events follow, so that the body is not to be read at once."""
    content_type: str = response.headers.get("content-type", "")
    return not response.is_error and content_type.lower().startswith("text/event-stream")


def check_answer(response: httpx.Response) -> None:
    """Raise RequestError for an HTTP error (its body read), with the server's own message, and for a redirect.

    That is not followed: a key would go to whom it was not meant for.
    """
    status = response.status_code
    if response.has_redirect_location:
        location = response.headers["location"]
        raise RequestError(
            f"HTTP {status}: {response.url} has moved to {location}", "Give that, up to /v1, as --url.", status
        )
    if not response.is_error:
        return
    try:
        message = error_message(response.json())
    except (ValueError, RecursionError):
        message = response.text or response.reason_phrase
    remedies = {
        401: f"Give the server's key with --api-key or {API_KEY_VARIABLE}.",
        404: "See /v1/models for what is served, and choose with --model or --url.",
        429: "The server's queue is full: try again later, or send less at a time.",
        503: "The server is loading, draining or overloaded: try again later.",
    }
    raise RequestError(f"HTTP {status}: {message}", remedies.get(status, ""), status)


def transport_error(error: httpx.HTTPError, url: httpx.URL) -> RequestError:
    """A failure below HTTP as a RequestError."""
    root = str(url).rstrip("/")
    causes = list(_causes(error))  # httpx tells of them and of a closed port alike
    if any(map(_is_of_files, causes)):
        return RequestError("too many open files: lower --concurrency or raise `ulimit -n`")
    fault = next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None)
    if isinstance(fault, ssl.SSLCertVerificationError):
        return RequestError(
            f"the certificate of {root} is not trusted ({fault.verify_message})",
            "Name its file, or that of who signed it, in the environment variable SSL_CERT_FILE.",
        )
    if fault is not None:
        return RequestError(f"no HTTPS with {root} ({fault.reason})", "Is its --url one that begins with http://?")
    if isinstance(error, httpx.ProxyError | httpx.ConnectError | httpx.ConnectTimeout) and (proxy := _proxy_of(url)):
        return RequestError(
            f"cannot connect to {root} through the proxy of the environment, {proxy}",
            "Are both running? no_proxy names addresses that need none.",
        )
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
        return silent(url, type(error).__name__)
    return RequestError(f"the connection to {root} failed ({type(error).__name__})")


def silent(url: httpx.URL, why: str = "no event, though the connection lives") -> RequestError:
    """The answer does not go on."""
    return RequestError(f"{str(url).rstrip('/')} fell silent for too long ({why})")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """A failure, and what it came of; where several addresses were tried, the failure of each."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__
