"""`lora`: LoRA adapters that are loaded as the server starts, each with a name of its own. It parses; it loads nothing.

NAME=PATH      PATH: a folder that PEFT wrote
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NamedLora:
    name: str
    path: str

    def __str__(self) -> str:
        """As it is written on the command line."""
        return f"{self.name}={self.path}"


def parse_loras(value: Any) -> Any:
    """Texts, each with one adapter or several with `;` between them. Raises ValueError that says what is wrong."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise ValueError("it must be NAME=PATH, or a list of such")
    if all(isinstance(text, NamedLora) for text in texts):
        return texts
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("each adapter must be a text NAME=PATH")
    found = [_parse_one(part.strip()) for text in texts for part in text.split(";") if part.strip()]
    if not found and texts:
        raise ValueError("it is given, but empty")
    names = [adapter.name for adapter in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two adapters have the name {name}")
    return found


def _parse_one(text: str) -> NamedLora:
    name, _, path = (part.strip() for part in text.partition("="))
    if not name or not path:
        raise ValueError(f"{text!r} must be NAME=PATH, for example sql=adapters/sql")
    return NamedLora(name, path)
