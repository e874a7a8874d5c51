"""Files that the clients' options name and that are written in the end: one that cannot be is found before any work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def check_output(option: str, path: Path) -> None:
    """Find before any work whether a file can be written; what it holds stays. Raises OSError that names the option."""
    with _named(option, path):
        if not path.is_fifo():  # whoever reads a pipe would take the closing for its end
            path.open("a").close()


def write_output(option: str, path: Path, text: str) -> None:
    """Write the file that an option names. Raises OSError that names the option."""
    with _named(option, path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _named(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{option} {path} cannot be written ({error.strerror or error}): "
            "name a file that you may write, in a folder with room for it."
        ) from error
