"""ToolStream: the calls of one choice in OpenAI's form, as its text comes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

from hamburger.server.tools.tool_fields import is_object
from hamburger.server.tools.tool_parsers import Family, Parsed, Parser
from hamburger.server.tools.value_ends import ValueEnds

_ID_CHARACTERS = string.ascii_letters + string.digits


class ToolStream:
    """The calls of one choice as they come: text in, what it adds to the message out.

    is_named: one function is forced, so that its call is no choice of the model (OpenAI then says `stop`).
    """

    def __init__(
        self, parser: Parser, family: Family, *, parallel: bool, is_named: bool, end_texts: Sequence[str]
    ) -> None:
        self._parser, self._family = parser, family
        self._parallel, self._is_named = parallel, is_named
        self._end_texts = end_texts
        self._text, self._ends = "", ValueEnds()
        self._content_size = 0
        self._arguments_sizes: list[int] = []
        self._ids: list[str] = []
        self._last_arguments = ""

    def reason(self, finish_reason: str | None, stop_reason: str | int | None) -> str | None:
        """OpenAI's finish_reason: calls that the model chose to make are its reason to stop."""
        are_made = finish_reason == "stop" and self._ids and not self._is_named and not self.is_cut(stop_reason)
        return "tool_calls" if are_made else finish_reason

    def is_cut(self, stop_reason: str | int | None) -> bool:
        """Whether a stop string or token, the stop_reason, ended the last call before it was whole."""
        return stop_reason is not None and bool(self._ids) and not is_object(self._last_arguments)

    def add(self, text: str, *, is_final: bool) -> dict[str, Any]:
        """The delta: new content, and tool_calls with what is new of each; {} where nothing is sure yet."""
        self._text += text
        parsed = self._parse(is_final)
        delta: dict[str, Any] = {}
        if content := parsed.content[self._content_size :]:
            delta["content"] = content
            self._content_size = len(parsed.content)
        pieces = []
        for index in range(max(len(self._ids) - 1, 0), len(parsed.calls)):  # those before it are whole
            call = parsed.calls[index]
            piece: dict[str, Any] = {"index": index}
            function: dict[str, str] = {}
            if index == len(self._ids):
                self._ids.append(self._new_id())
                self._arguments_sizes.append(0)
                piece |= {"id": self._ids[index], "type": "function"}
                function["name"] = call.name
            if (new := call.arguments[self._arguments_sizes[index] :]) or "name" in function:
                function["arguments"] = new
                self._arguments_sizes[index] = len(call.arguments)
                pieces.append(piece | {"function": function})
        return delta | {"tool_calls": pieces} if pieces else delta

    def message(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Content and tool_calls of a whole answer."""
        self._text, self._ends = text, ValueEnds()
        parsed = self._parse(True)
        self._ids = [self._new_id() for _ in parsed.calls]
        calls = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(self._ids, parsed.calls, strict=True)
        ]
        return parsed.content or (None if calls else ""), calls

    def _parse(self, is_final: bool) -> Parsed:
        text = self._text
        if is_final:
            for end_text in self._end_texts:
                text = text.removesuffix(end_text)
            self._ends = ValueEnds()  # the text may be shorter now
        parsed = self._parser(text, is_final, self._ends)
        if not self._parallel:
            parsed = Parsed(parsed.content, parsed.calls[:1])
        self._last_arguments = parsed.calls[-1].arguments if parsed.calls else ""
        return parsed

    def _new_id(self) -> str:
        if self._family == "mistral":  # its templates insist on nine letters and digits
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
