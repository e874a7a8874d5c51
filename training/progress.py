"""Progress bars of commands that work through many tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from hamburger.engine.progress_bar import speed_progress


class TokenBar:
    """A bar over items, with the tokens/s since it appeared."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._start = time.monotonic()
        self.num_tokens = 0

    def advance(self, items: int) -> None:
        self._progress.advance(self._task, items)

    def add_tokens(self, number: int) -> None:
        self.num_tokens += number
        speed = self.num_tokens / max(time.monotonic() - self._start, 1e-9)
        self._progress.update(self._task, speed=f"{speed:,.1f} tokens/s")


@contextmanager
def token_bar(title: str, total: int, console: Console | None) -> Iterator[TokenBar]:
    """Show a bar of `total` items on a console; without one nothing is shown."""
    with speed_progress(console or Console(quiet=True), visible=console is not None) as progress:
        yield TokenBar(progress, progress.add_task(title, total=total, speed=""))
