"""Files that the clients' options name: one that cannot be read or written is told with its option, before any work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path


def check_output(option: str, path: Path) -> None:
    """Find before any work whether a file can be written; what it holds stays, and one that is not there stays away.

    Raises OSError that names the option.
    """
    with writing(option, path):
        if path.is_fifo():  # whoever reads a pipe would take the closing for its end
            return
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file that was made by opening `path`, not a link that leads to it."""
    Path(os.path.realpath(path)).unlink(missing_ok=True)


def check_apart(paths: Mapping[str, Path | None]) -> None:
    """Raises ValueError where two options (None: not given) name one file: writing it would lose what it holds.

    A device or a pipe holds nothing.
    """
    files = [(option, path) for option, path in paths.items() if path and (path.is_file() or not path.exists())]
    for (first, path), (second, other) in combinations(files, 2):
        if _identity(path) == _identity(other):
            raise ValueError(f"{first} and {second} are the same file, {path}: name another one.")


def write_output(option: str, path: Path, text: str) -> None:
    """Write the file that an option names. Raises OSError that names the option."""
    with writing(option, path):
        path.write_text(text, encoding="utf-8")


def reading(option: str, path: Path) -> contextlib.AbstractContextManager[None]:
    """A block that reads the file of an option: its OSError names the option."""
    return _named(f"{option} {path} cannot be read", "name a file that is there and that you may read.")


def writing(option: str, path: Path) -> contextlib.AbstractContextManager[None]:
    """A block that writes the file of an option: its OSError names the option."""
    return _named(f"{option} {path} cannot be written", "name a file that you may write, in a folder with room for it.")


@contextlib.contextmanager
def _named(fault: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{fault} ({error.strerror or error}): {remedy}") from error


def _identity(path: Path) -> tuple[int, int] | str:
    """What two names of one file have in common, whether it is there or not."""
    try:
        found = path.stat()
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
