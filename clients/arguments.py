"""What the clients share on the command line: which server, and argparse types that name the mistake."""

from __future__ import annotations

import argparse
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

from hamburger.clients.connection import API_KEY_VARIABLE, check_key

DEFAULT_URL = "http://127.0.0.1:8000"
MOST_IN_FLIGHT = 10_000  # requests: each needs a connection of its own
_LONGEST_TIMEOUT = 2_000_000  # seconds: poll(2) takes no more than 2^31 ms
_T = TypeVar("_T")


def add_server_arguments(
    parser: argparse.ArgumentParser, default_model: str = "the first that the server lists"
) -> None:
    """The arguments that say which server, which model (default_model: what --help says of none) and as whom."""
    parser.add_argument("--url", type=server_url, default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument("--model", type=utf8_text, help=f"a served model's name (default: {default_model})")
    parser.add_argument(
        "--api-key", type=sendable_key, metavar="KEY", help=f"default: the environment variable {API_KEY_VARIABLE}"
    )


def add_patience_arguments(parser: argparse.ArgumentParser, *, concurrency: int) -> None:
    """How many requests are in flight, and how long one may take, where all are to be answered."""
    parser.add_argument(
        "--concurrency",
        type=whole_to(MOST_IN_FLIGHT),
        default=concurrency,
        metavar="N",
        help="requests in flight (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=waiting_time,
        default=900.0,
        metavar="S",
        help="longest wait for an answer in s (default: 900)",
    )


def server_url(text: str) -> str:
    """The root of the server without a trailing slash or `/v1`; an argparse type."""
    remedy = f"write it like {DEFAULT_URL}"
    if " " in text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} holds a space or another character that no URL has: {remedy}")
    try:
        url = httpx.URL(text)
        host = url.host  # decoded only here, and by the socket encoded once more: what they refuse is refused now
        url.raw_host.decode("ascii").encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL: {error}; {remedy}") from None
    if url.userinfo or "?" in text or "#" in text:
        # A password would stand in what the clients print and write, and replace the key; so it is not repeated here.
        raise argparse.ArgumentTypeError(
            f"a user's name, a password, a ?query and a #fragment are refused: {remedy}, a key goes to --api-key"
        )
    if url.scheme not in ("http", "https") or not host:
        raise argparse.ArgumentTypeError(f"{text!r} is not a server's URL: {remedy}")
    if url.port is not None and not 1 <= url.port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} has a port that none can be: write one from 1 to 65535")
    return text.rstrip("/").removesuffix("/v1")


def utf8_text(text: str) -> str:
    """A text that can be sent, as it is; an argparse type."""
    try:
        text.encode()
    except UnicodeEncodeError:  # Python lets bytes of the command line pass that are no text
        raise argparse.ArgumentTypeError(f"{text!r} holds bytes that are no UTF-8 text: write it in UTF-8") from None
    return text


def sendable_key(text: str) -> str:
    """A key that a request can carry; an argparse type. Its errors do not repeat it."""
    try:
        return check_key(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def unit_interval(text: str) -> float:
    """A number in [0, 1]; an argparse type, also used for the chat's /confidence."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a number from 0 to 1")
    return value


def non_negative(text: str) -> float:
    """A finite number that is at least 0; an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a number from 0 up")
    return value


def count(text: str) -> int:
    """A whole number that is at least 1; an argparse type."""
    return _whole_number(text, 1)


def positive(text: str) -> float:
    """A finite number above 0; an argparse type."""
    value = non_negative(text)
    if not value:
        raise argparse.ArgumentTypeError("it must be above 0")
    return value


def waiting_time(text: str) -> float:
    """Seconds above 0 that a socket can wait; an argparse type."""
    value = positive(text)
    if value > _LONGEST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is too long: write at most {_LONGEST_TIMEOUT}")
    return value


def whole(text: str) -> int:
    """A whole number that is at least 0; an argparse type."""
    return _whole_number(text, 0)


def whole_to(most: int, least: int = 1) -> Callable[[str], int]:
    """The argparse type of a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        return _whole_number(text, least, most)

    return parse


def file_path(text: str) -> Path:
    """The path of a file or a folder; an argparse type."""
    if text in ("", "-"):  # Path takes the first for the current folder, and no option reads or writes a pipe so
        raise argparse.ArgumentTypeError(f"{text!r} names no file: write its path")
    return Path(text)


def _whole_number(text: str, least: int, most: int | None = None) -> int:
    try:
        value = int(text) if text.isascii() and text.isdigit() else -1
    except ValueError:  # Python reads no number of more than 4300 digits
        value = -1
    if value < least or (most is not None and value > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number {bounds}")
    return value


def list_of(item: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """The argparse type of values with commas between them."""

    def parse(text: str) -> list[_T]:
        return [item(part.strip()) for part in text.split(",")]

    return parse
