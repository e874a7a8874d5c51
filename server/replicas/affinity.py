"""Which requests belong together: the key that sends them to the same engine, whose prefix cache knows them.

What needs a stored response can only go to the engine that has it, which is in its name.
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
from hamburger.server.responses.errors import PATH as RESPONSES
from hamburger.server.responses.store import place_of

SESSION = "x-session-id"
NAMED = "@"  # begins a key that says the name of a replica
_PREFIX_CHARS, _PREFIX_TOKENS = 512, 128


def affinity_key(path: str, headers: Mapping[str, str], body: bytes, affinity: Affinity) -> str | None:
    """The same text for requests that belong together; None when nothing says so, or for the affinity "none".

    Whatever the affinity is, what needs a stored response gets NAMED and the name of the replica that has it.
    """
    is_response = path.startswith(f"{RESPONSES}/") or path == RESPONSES
    session = headers.get(SESSION) if affinity != "none" else None
    fields = _fields(body) if is_response or (affinity == "prefix" and not session) else {}
    if is_response and (name := _replica_of(path, fields)):
        return NAMED + name
    if session:
        return _digest("session", session)
    return _prefix_key(fields) if affinity == "prefix" else None


def _fields(body: bytes) -> dict[str, Any]:
    """Empty where the body is none of ours: whichever engine gets it says what is wrong with it."""
    if not body:
        return {}
    try:
        check_number(body)
        fields = from_json(body)
    except (InvalidRequest, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _replica_of(path: str, fields: dict[str, Any]) -> str | None:
    """The name of the replica that stored the response which is asked for, or gone on with."""
    named = path.removeprefix(f"{RESPONSES}/").split("/")[0], fields.get("previous_response_id")
    return next((place for one in named if isinstance(one, str) and (place := place_of(one))), None)


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
