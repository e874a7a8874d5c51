"""The progress bars of all commands that work through answers or examples. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hamburger.engine.request import RequestUpdate


def speed_progress(console: Console, *, visible: bool) -> Progress:
    """A rich progress display; its tasks need the field `speed`, a text."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not visible,
    )


@contextmanager
def progress_of_answers(num_requests: int, *, visible: bool) -> Iterator[Callable[[RequestUpdate], None]]:
    """A bar of finished answers, with tokens/s and tokens per step so far; give it every update."""
    with speed_progress(Console(stderr=True), visible=visible) as bar:
        task = bar.add_task("Generating", total=num_requests, speed="")
        start, num_tokens, num_groups = time.monotonic(), 0, 0

        def show(update: RequestUpdate) -> None:
            nonlocal num_tokens, num_groups
            num_tokens += len(update.token_ids)
            num_groups += bool(update.token_ids)
            seconds = max(time.monotonic() - start, 1e-9)
            speed = f"{num_tokens / seconds:.1f} tokens/s, {num_tokens / max(num_groups, 1):.2f} tokens per step"
            bar.update(task, advance=int(update.finish_reason is not None), speed=speed)

        yield show
