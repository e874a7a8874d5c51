"""What is typed or piped into `hamburger chat`: questions of one line or of several, with editing and a history."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOST_REMEMBERED = 1000  # lines
_QUOTES = '"""'
_GOES_ON = "\\"


class Typed(NamedTuple):
    """What was typed or piped in. is_quoted: it stood between two \"\"\", so it is no command."""

    text: str
    is_quoted: bool = False


def history_path() -> Path:
    """Where typed lines are kept: XDG's place for what a user did."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"  # RuntimeError: the user has no home
    return Path(state) / "hamburger" / "chat_history"


def typed_lines(interactive: bool) -> Iterator[Typed]:
    """Non-empty questions until the end of input or a Ctrl-C at the prompt.

    interactive: standard input is a terminal; a line that ends with a backslash goes on in the next one, and so do all
    lines between two \"\"\". Else each line is a question, or what it has between them. Raises ValueError for what is
    piped in and no text in the terminal's encoding; a typed line that is none is left out, and told.
    """
    if not interactive:
        with contextlib.suppress(KeyboardInterrupt):
            yield from _piped_lines()
        return
    with _history():
        while True:
            try:
                question = _question()
                _check(question.text)
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)
                return
            except UnicodeError:
                print(f"error: that was no {_encoding()} text: write it again.", file=sys.stderr)
                continue
            if question.text:
                yield question


def _piped_lines() -> Iterator[Typed]:
    try:
        for line in sys.stdin:
            _check(line)
            question = _unquoted(line.strip().removeprefix("\ufeff"))  # which editors put at a file's beginning
            if question.text:
                yield question
    except UnicodeError as error:
        raise ValueError(
            f"standard input is no {_encoding()} text: convert it first, as `iconv -f LATIN1 -t UTF-8` does."
        ) from error


def _check(text: str) -> None:
    """Raises UnicodeEncodeError for bytes that are no text, which Python lets pass in the C locale."""
    text.encode()


def _encoding() -> str:
    return (sys.stdin.encoding or "utf-8").upper()


def _unquoted(line: str) -> Typed:
    inner = line.removeprefix(_QUOTES).removesuffix(_QUOTES)
    is_quoted = len(line) - len(inner) == 2 * len(_QUOTES)
    return Typed(inner.strip(), True) if is_quoted else Typed(line)


def _input(prompt: str) -> str:
    """A typed line. Python would write the prompt to standard output, which may be a file of answers."""
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


def _question() -> Typed:
    line = _input("> ").strip()
    if line.startswith(_QUOTES):
        lines, rest = [], line.removeprefix(_QUOTES)
        while not rest.rstrip().endswith(_QUOTES):
            lines.append(rest)
            rest = _input("... ")
        return Typed("\n".join([*lines, rest.rstrip().removesuffix(_QUOTES)]).strip(), is_quoted=True)
    lines = []
    while line.endswith(_GOES_ON):
        lines.append(line.removesuffix(_GOES_ON))
        line = _input("... ")
    return Typed("\n".join([*lines, line]).strip())


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing, and the lines of earlier chats, where the platform has them and the file can be kept."""
    try:
        import readline

        path = history_path()
    except (ImportError, RuntimeError):
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_MOST_REMEMBERED)
    before = readline.get_current_history_length()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # it holds what was asked
            if hasattr(readline, "append_history_file"):  # what another chat has written meanwhile stays
                readline.append_history_file(readline.get_current_history_length() - before, path)
            else:  # libedit's, as on macOS
                readline.write_history_file(path)
