"""JSON Lines files: plain or gzipped ones that the clients read, and those that grow while they work."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

from hamburger.clients.output_files import reading, remove, writing

_T = TypeVar("_T")


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


class GrowingFile(Generic[_T]):
    """The file of an option, to which rows are added as they come, each on disk at once: work that was stopped goes on
    there. A context manager: it closes the file, and leaves none where there was none and no row came."""

    def __init__(self, option: str, path: Path, parse: Callable[[int, bytes], _T]) -> None:
        """Read what is there: `rows`, of each line with its number, from 1. A last line that was cut off is dropped. A
        device or a pipe holds nothing.

        Raises OSError that names the option, also where another run writes the file, ValueError for a name that says
        it is compressed, and what `parse` raises, by which the file stays as it is.
        """
        if path.suffix == ".gz":
            raise ValueError(f"{option} {path} would hold plain lines, which a later run goes on from: leave .gz out.")
        self._option, self._path, self._is_new = option, path, not path.exists()
        self._is_device = not self._is_new and not path.is_file()
        with writing(option, path):
            # Half of a surrogate pair, which JSON can hold, is no text that a file can.
            self._file = path.open("a", encoding="utf-8", errors="replace")
        try:
            self.rows: list[_T] = [] if self._is_device else self._read(parse)
        except BaseException:
            self._file.close()
            raise
        self._has_rows = bool(self.rows)

    def __enter__(self) -> GrowingFile[_T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with writing(self._option, self._path):
            self._file.close()
        if self._is_new and not self._has_rows:
            remove(self._path)

    def clear(self) -> None:
        """Leave none of its rows."""
        if self._is_device:  # which is not to be removed
            return
        self._is_new, self._has_rows = True, False
        with writing(self._option, self._path):
            self._file.truncate(0)

    def add(self, row: dict[str, Any]) -> None:
        self._has_rows = True
        with writing(self._option, self._path):
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()

    def _read(self, parse: Callable[[int, bytes], _T]) -> list[_T]:
        _lock(self._option, self._path, self._file)
        with reading(self._option, self._path):
            data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        rows = [parse(number, line) for number, line in enumerate(whole.split(b"\n"), 1) if line.strip()]
        if whole != data:
            with writing(self._option, self._path):
                self._file.truncate(len(whole))
        return rows


def _lock(option: str, path: Path, file: IO[str]) -> None:
    """Keep the file to this run until it is closed, where the system has such locks. Raises OSError."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{option} {path} is written by another run now: wait for it, or name another file.") from None
    except OSError:  # some network's folders have none
        return


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
