"""What the server announces while it starts and stops: lines for people on stdout, or records of the JSON log."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hamburger.engine.logs import MASK, SECRET_VARIABLES, LogFormat, escaped, secrets_of_environment
from hamburger.server.config import ServeSettings

logger = logging.getLogger("hamburger.start")

Announce = Callable[[str], None]


def announcer(log_format: LogFormat) -> Announce:
    """A function that announces a line with the seconds since now; in JSON as a log record, whatever its level. Further
    lines are for people."""
    start = time.monotonic()

    def announce_on_stdout(line: str) -> None:
        _print_line(f"[{time.monotonic() - start:5.1f} s] {line}")

    def announce_in_log(line: str) -> None:
        logger.info(line.partition("\n")[0], extra={"fields": {"uptime_seconds": round(time.monotonic() - start, 1)}})

    if log_format == "text":
        return announce_on_stdout
    logger.setLevel(logging.INFO)
    return announce_in_log


def announce_settings(settings: ServeSettings, announce: Announce) -> None:
    """The configuration, once, with secrets masked: all of it in JSON, for people what differs from the defaults."""
    if settings.log_format == "json":
        logger.info("settings", extra={"fields": {"settings": settings_without_secrets(settings, os.environ)}})
        return
    changed = {
        name: value
        for name, value in settings_without_secrets(settings, os.environ).items()
        if name not in ServeSettings.model_fields or getattr(settings, name) != ServeSettings.model_fields[name].default
    }
    if changed:
        announce("settings: " + escaped(", ".join(f"{name} {value}" for name, value in changed.items())))


def settings_without_secrets(settings: ServeSettings, environment: Mapping[str, str]) -> dict[str, Any]:
    """All settings as plain values; keys and tokens as ***."""
    values: dict[str, Any] = {}
    for name in ServeSettings.model_fields:
        value = getattr(settings, name)
        values[name] = str(value) if isinstance(value, Path) else value
    values["api_key"] = [MASK] * len(settings.api_key)
    values["also"] = [str(model) for model in settings.also]
    values["lora"] = [str(adapter) for adapter in settings.lora]
    return values | {name: MASK for name in SECRET_VARIABLES if environment.get(name)}


def secrets_of(settings: ServeSettings) -> list[str]:
    """What no line of the log may hold, whoever writes it. Raises SettingsError."""
    return [*settings.api_keys(), *secrets_of_environment(os.environ)]


def _print_line(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more: no reason to stop serving, or to stop without draining
        print(text, flush=True)
