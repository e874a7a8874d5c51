"""JSON Lines files, plain or gzipped: rows with the place they stand at, and a file that grows line by line."""

from __future__ import annotations

import fcntl
import gzip
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from hamburger.training.errors import TrainingError

_READ_BYTES = 1 << 16


class Row(NamedTuple):
    """One line's object. place: "FILE, line N", for messages. line: N, counted from 1."""

    place: str
    line: int
    values: dict[str, Any]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a `.jsonl` or `.jsonl.gz` file; empty lines are skipped. Raises TrainingError or OSError."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Row(f"{path}, line {number}", number, _parse(f"{path}, line {number}", line))
        except (gzip.BadGzipFile, EOFError) as error:
            raise TrainingError(f"{path} is not a whole gzip file: {error}") from error


def text_of(row: Row, key: str) -> str:
    """A text field. Raises TrainingError when it is missing or no text."""
    value = row.values.get(key)
    if not isinstance(value, str):
        raise TrainingError(f'{row.place}: "{key}" must be a text, not {_shown(value)}.')
    return whole_text(row, f'"{key}"', value)


def whole_text(row: Row, name: str, text: str) -> str:
    """The text itself. Raises TrainingError where it has half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TrainingError(
            f"{row.place}: {name} has half of a surrogate pair (\\u{ord(text[error.start]):04x}) at character "
            f"{error.start}: remove it, or write both halves."
        ) from error
    return text


def ids_of(row: Row, key: str) -> list[int] | None:
    """A field of token ids; None where the row has none. Raises TrainingError when it is no list of whole numbers."""
    value = row.values.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
        raise TrainingError(f'{row.place}: "{key}" must be a list of token ids, not {_shown(value)}.')
    return value


def check_own(path: Path, keys: Collection[str], command: str, *, is_out: bool = False) -> None:
    """Whether `command` wrote the file that it wants to add to: its rows have these keys, the first tells.

    To be asked before a GrowingFile is opened, which cuts a file. is_out: --out names the file, not its folder.
    Raises TrainingError for another command's file.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        line, has_more = file.readline(), bool(file.read(1))
    try:
        values = _parse(f"{path}, line 1", line) if line.strip() or has_more else None
    except TrainingError:  # cut off when its writer was killed, or of another kind
        values = None if line.startswith(b"{") and not line.endswith(b"\n") else {}
    if values is not None and not values.keys() >= set(keys):
        if is_out:
            raise TrainingError(f"{path}, line 1 was not written by {command}: name another file with --out.")
        raise TrainingError(f"{path} was not written by {command}: move it away, or name another folder with --out.")


class GrowingFile:
    """A JSON Lines file that rows are appended to; each has reached the operating system when `append` returns.

    Opening it drops a last line that was cut off when its writer was killed. One process at a time may hold it.
    Raises TrainingError when another one does.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix == ".gz":
            raise TrainingError(f"{path}: answers are appended line by line, which gzip cannot: leave .gz out.")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TrainingError(f"{path} is being written by another process: wait for it or end it.") from error
            self._file.truncate(_whole_lines_bytes(path))
        except BaseException:
            self._file.close()
            raise

    def append(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values, ensure_ascii=False).encode(errors="surrogatepass") + b"\n")
        self._file.flush()

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _whole_lines_bytes(path: Path) -> int:
    """The file's length up to and with its last newline."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        while end:
            start = max(0, end - _READ_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _parse(place: str, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one
        raise TrainingError(f"{place} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise TrainingError(f"{place} is nested too deeply to be read: mend or remove the line.") from error
    if not isinstance(values, dict):
        raise TrainingError(f"{place} is not a JSON object.")
    return values


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]
