"""What a chat message says as one text, where clients send it in parts."""

from __future__ import annotations

from typing import Any

from hamburger.engine.types.errors import shown


def one_text(content: Any) -> Any:
    """A message's content as one text; text parts are joined by line breaks. A refusal is what the assistant said.

    What is no list is given back. Raises ValueError for a part that is no text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise ValueError(f"a part is an object with a type, not {shown(part)}")
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise ValueError(f"only text parts are supported, not {shown(kind)}")
        if not isinstance(part.get(kind), str):
            raise ValueError(f"a {kind} part needs a string `{kind}`")
        texts.append(part[kind])
    return "\n".join(texts)
