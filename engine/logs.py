"""How log lines look, in both processes: for people, or one JSON object a line. It knows no HTTP and no requests.

A record may carry `fields` (logging's `extra={"fields": {...}}`): names and plain values beside the message. Whatever
stands in them, nobody can forge a line: control characters, line breaks and marks that turn text around are escaped,
and the lines of a traceback are indented (in JSON they are one string).
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]
MASK = "***"
# Of the environment: what models of the hub are fetched with.
SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SECRET_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")  # of a collector, by commas
_MIN_SECRET = 8  # characters: to replace shorter ones would spoil ordinary words
_MAX_WAITING = 10_000  # lines that nobody has read yet
_CLOSE_SECONDS = 2.0
_PAUSE_SECONDS = 0.05  # after lines were written


def secrets_of_environment(environment: Mapping[str, str]) -> list[str]:
    tokens = [environment.get(name, "") for name in SECRET_VARIABLES]
    headers = [header.strip() for name in _SECRET_HEADERS for header in environment.get(name, "").split(",")]
    return [secret for secret in (*tokens, *headers) if secret]


def configure_logging(level: str, log_format: LogFormat, handler: logging.Handler, secrets: Sequence[str] = ()) -> None:
    """Send all records to `handler`: ours from `level` on, those of other libraries at most from INFO on.

    Their debug records may hold the headers of requests. secrets: texts that are masked wherever they would be written.
    """
    handler.setFormatter(formatter_of(log_format, secrets))
    root, ours = logging.getLogger(), logging.getLogger("hamburger")
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    ours.setLevel(level.upper())
    root.setLevel(max(ours.level, logging.INFO))


def log_options() -> list[str]:
    """The level and format that configure_logging has set here, for a process that is started; none where it was not
    called."""
    level = logging.getLevelName(logging.getLogger("hamburger").level).lower()
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            return [level, "json" if isinstance(handler.formatter, JsonFormatter) else "text"]
    return []


def formatter_of(log_format: LogFormat, secrets: Sequence[str] = ()) -> logging.Formatter:
    """Writes records as configure_logging says."""
    return JsonFormatter(secrets) if log_format == "json" else TextFormatter(secrets)


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message name=value ...`; an indented line for each one of a traceback."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._secrets = _worth_masking(secrets)

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_time(record)} {record.levelname} {record.name}: {escaped(record.getMessage())}"]
        parts += [f"{name}={_value(value)}" for name, value in _fields(record).items() if value is not None]
        lines = [" ".join(parts)]
        lines += [f"    {escaped(line)}" for line in (_traceback(self, record) or "").splitlines()]
        return _masked("\n".join(lines), self._secrets)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and `traceback` where there is one."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._secrets = _worth_masking(secrets)

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        traceback = _traceback(self, record)
        if traceback is not None:
            fields["traceback"] = traceback
        # ASCII only: whatever reads lines splits them at \n alone, or at U+2028 too.
        return _masked(json.dumps(fields, default=str), self._secrets)


class BackgroundHandler(logging.Handler):
    """Writes lines from a thread of its own, so that whoever logs never waits for a slow or stuck reader.

    When 10,000 lines wait, further ones are dropped, and their number is logged when there is room again. `close`
    writes what waits, for 2 seconds at most.
    """

    def __init__(self, stream: TextIO | None = None, max_waiting: int = _MAX_WAITING) -> None:
        super().__init__()
        self.setFormatter(TextFormatter())
        self._stream = sys.stderr if stream is None else stream
        self._lines: queue.Queue[str | None] = queue.Queue(max_waiting)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write, name="hamburger-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        # Formatted here: the record's values may change later. logging holds this handler's lock meanwhile.
        try:
            line = self.format(record)
            if self._num_dropped:
                dropped = logging.makeLogRecord(
                    {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
                    | {"msg": "%d log lines were dropped: nobody read them.", "args": (self._num_dropped,)}
                )
                self._lines.put_nowait(self.format(dropped))
                self._num_dropped = 0
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def is_empty(self) -> bool:
        """Whether no line waits."""
        return self._lines.empty()

    def close(self) -> None:
        try:
            self._lines.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        except queue.Full:
            pass
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line + "\n")
                if self._lines.empty():
                    self._stream.flush()
                    time.sleep(_PAUSE_SECONDS)  # what comes meanwhile need not wake this thread line by line
            except (OSError, ValueError):  # nobody reads any more, or it was closed: no reason to stop serving
                continue


def escaped(text: str) -> str:
    """`text` on one line: control characters, line breaks and marks that turn text around as \\x.."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _value(value: Any) -> str:
    """A field for people: quoted where it could be taken for more than one."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    plain = bool(text) and text.isprintable() and not any(c in text for c in ' ="\\')
    return text if plain else json.dumps(text)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", None) or {}
    return fields


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    return formatter.formatException(record.exc_info) if record.exc_info else None


def _worth_masking(secrets: Sequence[str]) -> list[str]:
    # As they stand in a line: JSON writes some characters in another way.
    long = [secret for secret in secrets if len(secret) >= _MIN_SECRET]
    return sorted({*long, *(json.dumps(secret)[1:-1] for secret in long)}, key=len, reverse=True)


def _masked(line: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        line = line.replace(secret, MASK)
    return line
