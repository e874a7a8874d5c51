"""What the clients share on the command line: which server, and argparse types that name the mistake."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

import httpx

from hamburger.clients.wire import API_KEY_VARIABLE

DEFAULT_URL = "http://127.0.0.1:8000"
_T = TypeVar("_T")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which server, which model and as whom."""
    parser.add_argument("--url", type=server_url, default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument("--model", help="a served model's name (default: the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help=f"default: the environment variable {API_KEY_VARIABLE}")


def server_url(text: str) -> str:
    """The root of the server without a trailing slash or `/v1`; an argparse type."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise argparse.ArgumentTypeError(f"{text!r} is not a server's URL: write it like {DEFAULT_URL}")
    return text.rstrip("/").removesuffix("/v1")


def unit_interval(text: str) -> float:
    """A number in [0, 1]; an argparse type, also used for the chat's /confidence."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def non_negative(text: str) -> float:
    """A finite number that is at least 0; an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def count(text: str) -> int:
    """A whole number that is at least 1; an argparse type."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0; an argparse type."""
    value = non_negative(text)
    if not value:
        raise argparse.ArgumentTypeError("it must be above 0")
    return value


def whole(text: str) -> int:
    """A whole number that is at least 0; an argparse type."""
    return 0 if text == "0" else count(text)


def list_of(item: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """The argparse type of values with commas between them."""

    def parse(text: str) -> list[_T]:
        return [item(part.strip()) for part in text.split(",")]

    return parse
