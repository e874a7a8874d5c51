"""How a client's command ends: one line on stderr that says why, and an exit code; by SIGTERM as by Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from rich.console import Console

from hamburger.clients.wire import RequestError


def fail(err: Console, message: str, code: int) -> int:
    """Say why; returns the code."""
    err.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    return code


def end_of_resumable(work: Callable[[], int], err: Console) -> int:
    """The exit code of work whose answers are kept as they come: its own; 1 when a request failed, 2 for options or
    files (OSError, ValueError), 130 for Ctrl-C."""
    try:
        return work()
    except (OSError, ValueError) as error:
        return fail(err, str(error), 2)
    except RequestError as error:
        message = str(error).rstrip(".")
        return fail(err, f"{message}. Answers so far are kept: the same command goes on from there.", 1)
    except KeyboardInterrupt:
        return fail(err, "stopped; the same command goes on from there", 130)


@contextlib.contextmanager
def terminated_as_by_ctrl_c() -> Iterator[None]:
    """`timeout` and batch systems send SIGTERM: what was done until then is kept.

    By the handler that asyncio.run has set for Ctrl-C, which cancels; an exception could be raised in any task.
    """
    handler = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGTERM, handler if callable(handler) else signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
