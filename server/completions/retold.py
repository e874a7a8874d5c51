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

    @property
    def _call_is_cut(self) -> bool:
        """Whether a stop string or token ended the answer within its last call."""
        [choice] = self._chat.choices
        return choice.tools is not None and choice.tools.is_cut(choice.stop_reason)

    def add(self, index: int, update: RequestUpdate) -> None:
        self._chat.add(index, update)

    def counts(self) -> dict[str, Any]:
        return self._chat.counts() | {"answer_id": self.id}
