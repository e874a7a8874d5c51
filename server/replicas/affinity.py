"""Which requests belong together: the key that sends them to the same engine, whose prefix cache knows them.

`X-Session-Id` names a session. Without it, a conversation is known by its beginning: all turns of a chat repeat its
messages up to the first of the user, and completions with long common prompts begin alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.api.request_body import check_number
from hamburger.server.replicas.scale_options import Affinity

SESSION = "x-session-id"
_PREFIX_CHARS, _PREFIX_TOKENS = 512, 128


def affinity_key(headers: Mapping[str, str], body: bytes, affinity: Affinity) -> str | None:
    """The same text for requests that belong together; None when nothing says so, or for the affinity "none"."""
    if affinity == "none":
        return None
    session = headers.get(SESSION)
    if session:
        return _digest("session", session)
    if affinity == "session" or not body:
        return None
    try:
        check_number(body)
        fields = from_json(body)
    except (InvalidRequest, ValueError):
        return None  # whichever engine gets it says what is wrong with it
    return _prefix_key(fields) if isinstance(fields, dict) else None


def _prefix_key(fields: dict[str, Any]) -> str | None:
    messages, prompt, given = (fields.get(name) for name in ("messages", "prompt", "input"))
    if given is not None:
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if isinstance(messages, list):
        first = fields.get("system") or fields.get("instructions")
        return _digest("chat", fields.get("tools"), first, _opening(messages))
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], (list, str)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _digest("text", prompt[:_PREFIX_CHARS])
    return _digest("tokens", prompt[:_PREFIX_TOKENS]) if isinstance(prompt, list) else None


def _opening(messages: list[Any]) -> list[Any]:
    """The messages up to the first of the user."""
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return messages[: i + 1]
    return messages


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
