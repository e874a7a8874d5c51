"""How the command `hamburger` ends: its exit codes, and SIGTERM and SIGHUP before there is a server that drains."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import NoReturn

DIED, FAILED, INTERRUPTED = 1, 2, 130
UNREAD = 141  # nobody reads what it writes: as shells say of SIGPIPE


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends what Ctrl-C ends; but who sends it asked for the end, so that it is none to be told of."""


def on_sigterm(number: int, frame: object) -> NoReturn:
    """A handler of signals."""
    raise Terminated


class Hangup:
    """What SIGHUP means: that the terminal is gone, or else, as to other servers, that files are to be read anew.

    Made as the process starts.
    """

    def __init__(self) -> None:
        # As nohup has it: it is to live on without a terminal.
        self._outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._had_terminal = _has_terminal()

    def is_an_end(self) -> bool:
        """Whether the server goes with the terminal that it was started in. Told once: shell and kernel both send the
        signal, and the second would disturb the end."""
        is_gone = self._had_terminal and not self._outlives and not _has_terminal()
        if is_gone:
            self._had_terminal = False
        return is_gone

    def on_signal(self, number: int, frame: object) -> None:
        """A handler of signals, until the server serves: what it reads anew it has not read yet."""
        if self.is_an_end():
            raise Terminated


def _has_terminal() -> bool:
    """Whether a standard stream is one; after a hangup none is any more."""
    with contextlib.suppress(ValueError):  # closed
        return any(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr) if stream is not None)
    return False
