"""Certificates and API keys that are read anew while the server serves: as their files change, or SIGHUP asks. No HTTP.

What cannot be used is logged, and what was read before stays. Connections and requests that are open go on.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hamburger.server.config import ServeSettings, SettingsError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0


class RotatedFiles:
    """Files that are read together, at once and whenever they have changed."""

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], None]) -> None:
        """what: is in them. load: reads them and uses what it read, or raises SettingsError, here too."""
        self.what, self._paths, self._load = what, paths, load
        self._loaded = self._seen = self._stamps()
        load()

    def look(self) -> bool:
        """Read them if they have changed, but not since the last look: who writes may not be done. Whether they were
        read, and are used."""
        before, self._seen = self._seen, self._stamps()
        return self._seen == before and self._seen != self._loaded and self.read()

    def read(self) -> bool:
        """Whether they could be used."""
        self._loaded = self._stamps()
        try:
            self._load()
        except SettingsError as error:
            logger.error("What was read before stays, as %s cannot be used: %s", self.what, error)
            return False
        return True

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def rotate(files: Sequence[RotatedFiles], asked: asyncio.Event, announce: Callable[[str], None]) -> None:
    """Read them when they change, all of them when `asked` is set. Runs until it is cancelled."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await asked.wait()
        is_asked = asked.is_set()
        asked.clear()  # who asks from here on, while files are read, has all of them read once more
        if is_asked and not files:
            announce("SIGHUP: there is no file of keys or certificates to read anew")
        for each in files:
            if await asyncio.to_thread(each.read if is_asked else each.look):  # a network's folder may take its time
                announce(f"{each.what} was read anew")


class Certificate:
    """What new connections speak TLS with: that of ssl_certfile as it was last read."""

    def __init__(self, settings: ServeSettings) -> None:
        """Raises SettingsError when it cannot be used."""
        self._settings = settings
        self.context: ssl.SSLContext
        self.read()

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self._settings.ssl_certfile, self._settings.ssl_keyfile) if path is not None]

    def read(self) -> None:
        """Raises SettingsError, and changes nothing, when it cannot be used. A context of its own each time: one that
        reads half of a pair holds what does not belong together."""
        settings = self._settings
        for name in ("ssl_certfile", "ssl_keyfile"):
            if (path := getattr(settings, name)) is not None:
                try:
                    path.open("rb").close()
                except OSError as error:
                    raise SettingsError(f"{name} {path} cannot be read: {error.strerror}.") from error
        holder = "ssl_certfile" if settings.ssl_keyfile is None else "ssl_keyfile"
        key = f"{holder} {getattr(settings, holder)}"

        def password() -> str:
            raise SettingsError(
                f"{key} holds an encrypted key, which nobody can unlock here: give one without a password."
            )

        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(str(settings.ssl_certfile), settings.ssl_keyfile, password)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"ssl_certfile {settings.ssl_certfile} cannot be used with the key of {key}: {error}. Is it a "
                "certificate, and is the key its own, in a file that ssl_keyfile names, or behind it?"
            ) from error
        self.context = context


def certificate_of(settings: ServeSettings) -> Certificate | None:
    """None where TLS is not spoken. Raises SettingsError."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise SettingsError("ssl_keyfile is given without ssl_certfile.")
        return None
    return Certificate(settings)
