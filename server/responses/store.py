"""ResponseStore: answered responses, so that a client can ask for one again and go on with it. Bounded, in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from hamburger.engine.types.errors import cut
from hamburger.server.api.errors import ApiError


@dataclass
class Stored:
    """response: as it was answered. items: its input, as `input_items` gives it. turns: the chat up to and with it.

    key: of the client whose it is. cancel: ends one that is still being written; None for others.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    key: str
    cancel: Callable[[], None] | None = None
    size: int = 0


class ResponseStore:
    """The oldest make room for new ones, once all take more than max_bytes; those still being written stay."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._size = max_bytes, 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, stored: Stored) -> None:
        """Also in place of an earlier one of the same id. One that is larger than all may be is not kept."""
        response_id = stored.response["id"]
        self._forget(response_id)
        stored.size = len(msgspec.json.encode([stored.response, stored.items, stored.turns]))
        if stored.size > self._max_bytes and stored.cancel is None:
            return
        self._stored[response_id] = stored
        self._size += stored.size
        for old_id in [old_id for old_id, old in self._stored.items() if old.cancel is None]:
            if self._size <= self._max_bytes:
                break
            self._forget(old_id)

    def get(self, response_id: str, key: str, param: str | None = None) -> Stored:
        """Raises ApiError 404 for one that is not there, or another client's."""
        stored = self._stored.get(response_id)
        if stored is None or stored.key != key:
            raise ApiError(
                404,
                f"The response {cut(response_id)} is not stored here: it was not to be, or others took its place.",
                param=param,
                code="response_not_found",
            )
        return stored

    def delete(self, response_id: str, key: str) -> None:
        """Raises ApiError 404."""
        if (cancel := self.get(response_id, key).cancel) is not None:
            cancel()
        self._forget(response_id)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def _forget(self, response_id: str) -> None:
        if (stored := self._stored.pop(response_id, None)) is not None:
            self._size -= stored.size
