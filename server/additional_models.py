"""`also`: further models that one server serves, each with its own name and engine. It parses, and loads nothing.

NAME=MODEL[,SETTING=VALUE]...      MODEL as after `hamburger serve`; left out, the embedded model
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hamburger.engine.types.config import ENGINE_SETTINGS

_DIAL_SETTINGS = frozenset({"target_tpot_ms", "min_confidence", "max_confidence"})
_TEXT_SETTINGS = frozenset({"model_alias", "tool_parser", "chat_template", "chat_template_kwargs", "sampling_defaults"})
# What may differ between models. Everything else belongs to the server that they share.
OWN_SETTINGS = frozenset(ENGINE_SETTINGS) - {"model"} | {"lora"} | _DIAL_SETTINGS | _TEXT_SETTINGS
# What belongs to a checkpoint: what was set for the first model says nothing about another.
NOT_INHERITED = frozenset({"base", "confidence", "lora", "max_loras"}) | _DIAL_SETTINGS | _TEXT_SETTINGS


@dataclass(frozen=True, slots=True)
class AdditionalModel:
    """One further model. model: None is the embedded one. settings: what was written for it, unchecked."""

    name: str
    model: str | None
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As it is written on the command line."""
        settings = [(name, part) for name, value in self.settings.items() for part in value.split(";")]
        return ",".join([f"{self.name}={self.model or ''}", *(f"{name}={value}" for name, value in settings)])


def parse_additional_models(value: Any) -> Any:
    """Texts, each with one model or several with `;` between them. Raises ValueError that says what is wrong."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise ValueError("it must be NAME=MODEL, or a list of such")
    if all(isinstance(text, AdditionalModel) for text in texts):
        return texts
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("each model must be a text NAME=MODEL")
    found = [_parse_one(part.strip()) for text in texts for part in text.split(";") if part.strip()]
    if not found and texts:
        raise ValueError("it is given, but empty")
    return found


def _parse_one(text: str) -> AdditionalModel:
    # A comma inside a path is no separator: only one that a setting follows.
    head, *rest = re.split(r",(?=\s*[A-Za-z_-]+\s*=)", text)
    name, equals, model = (part.strip() for part in head.partition("="))
    if not name or not equals:
        raise ValueError(f"{text!r} must be NAME=MODEL, for example base=builtin")
    settings: dict[str, str] = {}
    for part in rest:
        key, _, setting = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in OWN_SETTINGS:
            raise ValueError(f"{name} sets {key}, but its own can be {', '.join(sorted(OWN_SETTINGS))}")
        if key in settings and key != "lora":
            raise ValueError(f"{name} sets {key} twice")
        # Several adapters, as between models, are no list of their own here.
        settings[key] = f"{settings[key]};{setting.strip()}" if key in settings else setting.strip()
    return AdditionalModel(name, model or None, settings)
