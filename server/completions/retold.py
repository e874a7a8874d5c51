"""RetoldReply: what replies have in common that tell a chat's answer in another API's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamburger.engine.request import RequestUpdate
from hamburger.server.completions.replies import ChatReply


def calls_of(delta: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The pieces of calls in a streamed delta: of what was begun before, which stands before the delta's text, and of
    what begins behind it."""
    pieces = delta.get("tool_calls", ())
    return [piece for piece in pieces if "id" not in piece], [piece for piece in pieces if "id" in piece]


def was_cut(choice: Mapping[str, Any]) -> bool:
    """Whether a stop string ended the choice of a chat, so that its last call, if it has any, is not whole. Whole calls
    are its reason to stop, or a grammar's end. choice: the last piece where it is streamed."""
    return choice["finish_reason"] == "stop" and isinstance(choice["stop_reason"], str)


class RetoldReply:
    """Half of a Reply (server/api/reply.py). chat: the answer that it tells; it has one choice."""

    def __init__(self, chat: ChatReply, reply_id: str) -> None:
        self.id, self._chat = reply_id, chat
        self.prompt_tokens = chat.prompt_tokens

    @property
    def confidence(self) -> float | None:
        return self._chat.confidence

    @confidence.setter
    def confidence(self, value: float | None) -> None:
        self._chat.confidence = value

    def add(self, index: int, update: RequestUpdate) -> None:
        self._chat.add(index, update)

    def counts(self) -> dict[str, Any]:
        return self._chat.counts() | {"answer_id": self.id}
