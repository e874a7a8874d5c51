"""MessagesReply: an answer in Anthropic's form, made of the chat's.

message_start ─► of each block content_block_start, ..delta, ..stop ─► message_delta, message_stop
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from hamburger.engine.request import RequestUpdate
from hamburger.server.api.errors import ApiError
from hamburger.server.api.events import typed_event
from hamburger.server.completions.replies import ChatReply
from hamburger.server.completions.retold import RetoldReply, calls_of
from hamburger.server.messages.errors import messages_error
from hamburger.server.tools.tool_fields import arguments_object

_OWN = ("kv_slots", "tokens_per_kv", "macro_steps", "tokens_per_step", "confidence")
_REASONS = {"length": "max_tokens"}


class MessagesReply(RetoldReply):
    """A Reply (server/api/reply.py), made of the chat's."""

    def __init__(self, chat: ChatReply, model: str) -> None:
        super().__init__(chat, f"msg_{uuid.uuid4().hex}")
        self._model = model
        self._num_blocks = 0
        self._open: str | None = None  # the kind of the block that is being written
        self._has_begun = self._has_calls = False

    def whole(self) -> dict[str, Any]:
        [choice] = self._chat.whole()["choices"]
        message = choice["message"]
        blocks: list[dict[str, Any]] = []
        if thinking := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thinking, "signature": self.id})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"],
                           "input": arguments_object(function["arguments"])})  # fmt: skip
            self._has_calls = True
        return self._message(blocks) | self._end(choice)

    def events(self, index: int, update: RequestUpdate) -> bytes:
        events: list[dict[str, Any]] = []
        for chunk in self._chat.chunks(index, update):
            [choice] = chunk["choices"]
            if not self._has_begun:
                self._has_begun = True
                usage = {name: count for name, count in self._usage().items() if name.endswith("_tokens")}
                start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
                events.append({"type": "message_start", "message": start})
            events += self._of_delta(choice["delta"])
            if choice["finish_reason"] is not None:
                events += self._closed()
                events.append({"type": "message_delta", "delta": self._end(choice), "usage": self._usage()})
        return b"".join(map(typed_event, events))

    def end(self) -> bytes:
        return typed_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return typed_event(messages_error(error))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "usage": self._usage(),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        """Ours beside theirs, where what was cached is no input."""
        usage = self._chat.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        own = {name: usage[name] for name in _OWN if name in usage}
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            **own,
        }

    def _end(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        finish_reason, stop_reason = choice["finish_reason"], choice["stop_reason"]
        if finish_reason == "tool_calls" or (finish_reason == "stop" and self._has_calls and not self._call_is_cut):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
        return {"stop_reason": _REASONS.get(finish_reason, "end_turn"), "stop_sequence": None}

    def _of_delta(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if thinking := delta.get("reasoning_content"):
            if self._open != "thinking":
                yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._block_event("delta", delta={"type": "thinking_delta", "thinking": thinking})
        open_calls, new_calls = calls_of(delta)
        for call in open_calls:
            yield from self._of_arguments(call)
        if text := delta.get("content"):
            if self._open != "text":
                yield from self._opened("text", {"type": "text", "text": ""})
            yield self._block_event("delta", delta={"type": "text_delta", "text": text})
        for call in new_calls:
            self._has_calls = True
            use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
            yield from self._opened("tool_use", use)
            yield from self._of_arguments(call)

    def _of_arguments(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What a delta adds to the open block, a call's."""
        if arguments := call["function"]["arguments"]:
            yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": arguments})

    def _opened(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._closed()
        self._open = kind
        self._num_blocks += 1
        yield self._block_event("start", content_block=block)

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":  # some clients keep no block that was never signed
            yield self._block_event("delta", delta={"type": "signature_delta", "signature": self.id})
        if self._open is not None:
            yield self._block_event("stop")
        self._open = None

    def _block_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": self._num_blocks - 1, **fields}
