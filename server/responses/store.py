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


@dataclass(frozen=True, slots=True)
class _Kept:
    """text: response, items and turns as JSON, which takes a fraction of the memory that they do."""

    text: bytes
    key: str
    cancel: Callable[[], None] | None


class ResponseStore:
    """The oldest make room for new ones, once all take more than max_bytes; those still being written stay."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._size = max_bytes, 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def put(self, stored: Stored) -> None:
        """Also in place of an earlier one of the same id. One that is larger than all may be is not kept."""
        response_id = stored.response["id"]
        self._forget(response_id)
        text = msgspec.json.encode([stored.response, stored.items, stored.turns])
        if len(text) > self._max_bytes and stored.cancel is None:
            return
        self._kept[response_id] = _Kept(text, stored.key, stored.cancel)
        self._size += len(text)
        while self._size > self._max_bytes:
            oldest = next((old_id for old_id, old in self._kept.items() if old.cancel is None), None)
            if oldest is None:
                break
            self._forget(oldest)

    def get(self, response_id: str, key: str, param: str | None = None) -> Stored:
        """Raises ApiError 404 for one that is not there, or another client's."""
        kept = self._kept.get(response_id)
        if kept is None or kept.key != key:
            raise ApiError(
                404,
                f"The response {cut(response_id)} is not stored here: it was not to be, or others took its place.",
                param=param,
                code="response_not_found",
            )
        response, items, turns = msgspec.json.decode(kept.text)
        return Stored(response, items, turns, key, kept.cancel)

    def delete(self, response_id: str, key: str) -> None:
        """Raises ApiError 404."""
        if (cancel := self.get(response_id, key).cancel) is not None:
            cancel()
        self._forget(response_id)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def _forget(self, response_id: str) -> None:
        if (kept := self._kept.pop(response_id, None)) is not None:
            self._size -= len(kept.text)
