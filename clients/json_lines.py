"""JSON Lines files, plain or gzipped, as the clients read them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The number, from 1, and the value of each line of a `.jsonl` or `.jsonl.gz` file; empty lines are skipped.

    A byte order mark is, too. Raises OSError, or ValueError that names the file, and the line where one is at fault.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parse(path, number, line)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be read: {error}. Copy the file again.") from None


def check_text(name: str, text: str) -> None:
    """Raises ValueError with that name for half of a surrogate pair, which JSON can write and no text has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise ValueError(
            f"{name} holds {half}, half of a surrogate pair, which no text has: write both halves, or none."
        ) from None


def _parse(path: Path, number: int, line: bytes) -> Any:
    try:
        text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} cannot be read: line {number} is no UTF-8 text. Copy the file again, or convert it, as "
            "`iconv -f LATIN1 -t UTF-8` does."
        ) from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: this is no JSON ({error}): write one object a line.") from None
    except RecursionError:
        raise ValueError(f"{path}, line {number}: its lists or objects are nested too deeply.") from None
