"""Server-sent events as bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def data_event(value: Any) -> bytes:
    """`data: JSON`."""
    data: bytes = msgspec.json.encode(value)
    if not data.isascii():  # clients split lines at more than \n (Python's splitlines at U+2028, for one)
        data = json.dumps(value, separators=(",", ":")).encode()
    return b"data: " + data + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """`event: TYPE`, and the value, whose `type` that is."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\n" + data_event(value)
