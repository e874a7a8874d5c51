"""How the command `hamburger` ends: its exit codes, and SIGTERM before there is a server that drains."""

from __future__ import annotations

from typing import NoReturn

DIED, FAILED, INTERRUPTED = 1, 2, 130


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends what Ctrl-C ends; but who sends it asked for the end, so that it is none to be told of."""


def on_sigterm(number: int, frame: object) -> NoReturn:
    """A handler of signals."""
    raise Terminated
