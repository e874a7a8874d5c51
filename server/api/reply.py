"""Reply: one request's answer in the form of one API, as the code sees it that sends answers."""

from __future__ import annotations

from typing import Any, Protocol

from hamburger.engine.request import RequestUpdate
from hamburger.server.api.errors import ApiError


class Reply(Protocol):
    """Either `add` for each group and then `whole`, or `events` for each group and then `end` or `failure`.

    confidence: to be told in the usage, where the server chose it; set before the first group.
    """

    id: str
    prompt_tokens: int
    confidence: float | None

    def add(self, index: int, update: RequestUpdate) -> None:
        """Take a group of the choice `index` into an answer that is sent as a whole."""

    def whole(self) -> dict[str, Any]:
        """The answer in one piece; `choices`, if it has any, are written one by one."""

    def events(self, index: int, update: RequestUpdate) -> bytes:
        """The server-sent events of a group; before those of the first whatever a stream begins with."""

    def end(self) -> bytes:
        """What a whole stream ends with."""

    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with that breaks off."""

    def counts(self) -> dict[str, Any]:
        """What the log says of it."""
