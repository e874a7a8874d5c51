"""What models are told of tools, calls and results whose chat template leaves them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def messages_with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], otherwise: str
) -> list[dict[str, Any]]:
    """For a chat template that knows nothing of tools: they are described in the system message, calls become text.

    otherwise: how a model answers that calls none.
    """
    rewritten = [dict(message) for message in messages]
    for message in rewritten:
        if calls := message.pop("tool_calls", None):
            text = json.dumps([call["function"] for call in calls], ensure_ascii=False)
            message["content"] = f"{message['content']}\n{text}".strip()
    if not tools:
        return rewritten
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system = (
        "You can call these functions:\n"
        f"{functions}\n"
        'To call one, answer with nothing but JSON: {"name": "the function", "arguments": {...}}. '
        f"For several calls, answer with a JSON list of these. Else answer {otherwise}."
    )
    if rewritten and rewritten[0]["role"] == "system":
        system = f"{rewritten[0]['content']}\n\n{system}"
        rewritten = rewritten[1:]
    return [{"role": "system", "content": system}, *rewritten]


def results_as_user(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For a chat template that leaves out the role `tool`: its messages come from the user, in one turn with what else
    the user says there, as such templates often want turns to alternate."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    rewritten: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            name = names.get(message.get("tool_call_id"), "the call")
            message = {"role": "user", "content": f"Result of {name}: {message['content']}"}
        if follows_result and message["role"] == "user":
            rewritten[-1]["content"] += f"\n\n{message['content']}"
        else:
            rewritten.append(dict(message))
        follows_result = is_result or (follows_result and message["role"] == "user")
    return rewritten
