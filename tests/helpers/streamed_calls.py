"""Calls as a client puts them together from what is streamed."""

from __future__ import annotations

from collections.abc import Sequence

from hamburger.server.tools.tool_use import ToolUse


def deltas(use: ToolUse, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """What a client puts together from the streamed deltas."""
    stream, content, calls = use.stream(), "", list[tuple[str, str]]()
    for i, piece in enumerate(pieces):
        delta = stream.add(piece, is_final=i == len(pieces) - 1)
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["id"]
                assert call["type"] == "function"
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    return content, calls
