"""speed_progress: the progress bar of all commands that work through answers or examples. No torch."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def speed_progress(console: Console, *, visible: bool = True) -> Progress:
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
