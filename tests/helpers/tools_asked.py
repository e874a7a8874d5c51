"""Tools that tests offer, a call of them, and what a model was told of them."""

from __future__ import annotations

from typing import Any

from serving import Served

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rom"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ROOM: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 1024}
CALL = '{"name": "get_weather", "arguments": {"city": "Rom"}}'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def told(server: Served) -> str:
    """The prompt that the model got."""
    return bytes(server.runner.prompts[-1]).decode()
