"""ResponseStore: answered responses, so that a client can ask for one again and go on with it. Bounded; in memory,
or in a file that outlives the server.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hamburger.engine.types.errors import cut
from hamburger.server.api.errors import ApiError
from hamburger.server.config import SettingsError

logger = logging.getLogger(__name__)
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, is_written INTEGER NOT NULL,
    text BLOB NOT NULL
)
"""
# The first form of the file named owners by the place that their key had in a list, which others may have by now.
_FORM = 2
_ID = "response_id"
_PLACED = re.compile(r"resp_[0-9a-f]{32}_(\w{1,64})", re.ASCII)


@dataclass
class Stored:
    """response: as it was answered. items: its input, as `input_items` gives it. turns: the chat up to and with it.

    owner: whose it is (owner_of of server/api/auth.py). cancel: ends one that is still being written; None for others.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    owner: str
    cancel: Callable[[], None] | None = None


def place_of(response_id: str) -> str | None:
    """Of which of several stores the id is, where they have places."""
    found = _PLACED.fullmatch(response_id)
    return None if found is None else found[1]


class ResponseStore:
    """The oldest make room for new ones, once all take more than max_bytes; those still being written stay.

    A response is kept as the JSON of all that is stored of it.
    """

    def __init__(self, max_bytes: int, path: Path | None = None, place: str = "") -> None:
        """path: of the file; None: memory. place: letters and digits that its ids end with (place_of). Raises
        SettingsError for a file that is none of ours, or another server's."""
        self._max_bytes, self._place = max_bytes, place
        self._cancels: dict[str, Callable[[], None]] = {}
        try:
            if path is not None:
                path.touch(mode=0o600)  # prompts and answers are nobody else's
            self._database = sqlite3.connect(
                path or ":memory:", isolation_level=None, check_same_thread=False, timeout=1
            )
            self._open()
        except (sqlite3.Error, OSError) as error:
            hint = " Another server has it open: give each its own." if "locked" in str(error) else ""
            message = f"response_file: {path} cannot be used: {error}.{hint}"
            raise SettingsError(message) from error
        self._size: int = self._database.execute("SELECT COALESCE(SUM(LENGTH(text)), 0) FROM responses").fetchone()[0]

    @property
    def keeps(self) -> bool:
        """Whether it has room for any."""
        return self._max_bytes > 0

    def new_id(self) -> str:
        """Of a response that may come to be stored here."""
        return f"resp_{uuid.uuid4().hex}" + (f"_{self._place}" if self._place else "")

    def put(self, stored: Stored) -> None:
        """Also in place of an earlier one of the same id. One that is larger than all may be, or that the disk does not
        take, is not kept; one of the background whose end it does not take has failed."""
        response_id = stored.response["id"]
        text = msgspec.json.encode([stored.response, stored.items, stored.turns])
        is_written = stored.cancel is None
        self._cancels.pop(response_id, None)
        if stored.cancel is not None:
            self._cancels[response_id] = stored.cancel
        try:
            with self._transaction():
                self._forget(response_id)
                if len(text) <= self._max_bytes or not is_written:
                    row = response_id, stored.owner, is_written, text
                    self._database.execute(
                        "INSERT INTO responses (id, owner, is_written, text) VALUES (?, ?, ?, ?)", row
                    )
                    self._size += len(text)
                    self._make_room()
        except sqlite3.Error as error:  # what was answered is not lost for it
            self._cancels.pop(response_id, None)
            logger.error("The response %s cannot be stored: %s", response_id, error)

    def get(self, response_id: str, owner: str, param: str | None = None) -> Stored:
        """Raises ApiError: 404 for one that is not there, or another client's, 503 where the disk does not give it."""
        found = "SELECT owner, text, is_written FROM responses WHERE id = ?"
        try:
            row = self._database.execute(found, (response_id,)).fetchone()
        except sqlite3.Error as error:
            logger.error("The response %s cannot be read: %s", response_id, error)
            message = f"The response {cut(response_id)} cannot be read now: try again later."
            raise ApiError(503, message, param=param, code="response_not_read") from error
        if row is None or row[0] != owner:
            raise ApiError(
                404,
                f"The response {cut(response_id)} is not stored here: it was not to be, or others took its place.",
                param=param,
                code="response_not_found",
            )
        response, items, turns = msgspec.json.decode(row[1])
        cancel = self._cancels.get(response_id)
        if not row[2] and cancel is None:
            response |= _failure("Its end could not be stored.")
        return Stored(response, items, turns, owner, cancel)

    def delete(self, response_id: str, owner: str) -> None:
        """One that is being written ends. Raises ApiError: 404, or 503 where the disk does not take it; all is then as
        it was."""
        cancel = self.get(response_id, owner, _ID).cancel
        try:
            with self._transaction():
                self._forget(response_id)
        except sqlite3.Error as error:
            logger.error("The response %s cannot be deleted: %s", response_id, error)
            message = f"The response {response_id} cannot be deleted now, and is still stored: try again later."
            raise ApiError(503, message, param=_ID, code="response_not_deleted") from error
        if cancel is not None:
            del self._cancels[response_id]
            cancel()

    def close(self) -> None:
        self._database.close()

    def __contains__(self, response_id: str) -> bool:
        try:
            found = self._database.execute("SELECT 1 FROM responses WHERE id = ?", (response_id,)).fetchone()
        except sqlite3.Error as error:
            logger.error("The response %s cannot be looked for: %s", response_id, error)
            return False
        return found is not None

    def __len__(self) -> int:
        number: int = self._database.execute("SELECT COUNT(*) FROM responses").fetchone()[0]
        return number

    def _open(self) -> None:
        # A second server would end what the first one is writing.
        self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._database.execute("PRAGMA journal_mode = WAL")  # a power cut loses the last ones, and breaks nothing
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute(_TABLE)
        self._of_this_form()
        broken = self._database.execute("SELECT number, text FROM responses WHERE NOT is_written").fetchall()
        for number, text in broken:
            response, items, turns = msgspec.json.decode(text)
            response |= _failure("The server was stopped.")
            row = msgspec.json.encode([response, items, turns]), number
            self._database.execute("UPDATE responses SET text = ?, is_written = 1 WHERE number = ?", row)
        self._database.execute("COMMIT")

    def _of_this_form(self) -> None:
        [form] = self._database.execute("PRAGMA user_version").fetchone()
        if form >= _FORM:
            return
        nobody = hashlib.sha256(b"").hexdigest()  # what was stored without keys, as it said it
        self._database.execute("UPDATE responses SET owner = '' WHERE owner = ?", (nobody,))
        dropped = self._database.execute("DELETE FROM responses WHERE owner != ''").rowcount
        self._database.execute(f"PRAGMA user_version = {_FORM}")
        if dropped:
            logger.warning(
                "response_file: %d responses of an earlier version are dropped, as it is not known whose they are.",
                dropped,
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of the writes inside, or none of them. Raises sqlite3.Error."""
        size = self._size
        try:
            self._database.execute("BEGIN")
            yield
            self._database.execute("COMMIT")
        except sqlite3.Error:
            self._size = size
            if self._database.in_transaction:  # some errors have ended it
                self._database.execute("ROLLBACK")
            raise

    def _forget(self, response_id: str) -> None:
        found = self._database.execute(
            "DELETE FROM responses WHERE id = ? RETURNING LENGTH(text)", (response_id,)
        ).fetchall()
        self._size -= sum(size for (size,) in found)

    def _make_room(self) -> None:
        while self._size > self._max_bytes:
            rows = self._database.execute("SELECT id FROM responses ORDER BY number")
            oldest = next((response_id for (response_id,) in rows if response_id not in self._cancels), None)
            if oldest is None:
                break
            self._forget(oldest)


def _failure(message: str) -> dict[str, Any]:
    return {"status": "failed", "error": {"code": "server_error", "message": message}}
