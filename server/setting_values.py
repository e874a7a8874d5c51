"""How settings are read that come as text: sizes, lists, origins, on and off. No setting is named here.

All raise ValueError, whose message is the end of a sentence that begins with the setting and its value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hamburger.engine.sampling_defaults import RECOMMENDED, checked_defaults
from hamburger.engine.types.config import ENGINE_SETTINGS
from hamburger.engine.types.errors import InvalidRequest

# What each rendering of a chat template is given, so that no variable can be.
RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(value: Any) -> Any:
    """ "4GiB", "512 MiB" or a plain number as bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", value.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("it must be a size such as 4GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def confidence_or_auto(value: Any) -> Any:
    """auto, or what can be read as a number."""
    try:
        number = None if value is None or value == "auto" else float(number_only(value))
    except (TypeError, ValueError):
        number = -1.0
    if ENGINE_SETTINGS["confidence"].fault(number) is not None:
        raise ValueError("it must be auto or a number in [0, 1]")
    return value if number is None else number


def number_only(value: Any) -> Any:
    """What YAML makes of `yes` or `on` is no number, though Python takes it for one."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def on_or_off(value: Any) -> Any:
    """What YAML makes of a plain `on` or `off` is true or false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def template_values(value: Any) -> Any:
    """A JSON object, or a mapping, of variables that a chat template may be given."""
    found = _object(value, '{"enable_thinking": false}')
    for name in found:
        if not isinstance(name, str) or name in RESERVED_VARIABLES:
            raise ValueError(f"{name!r} is set by each request: leave it out")
    return found


def sampling_values(value: Any) -> Any:
    """model, openai, or a JSON object (or a mapping) with values of RECOMMENDED."""
    if value in ("model", "openai"):
        return value
    found = _object(value, '{"temperature": 0.7, "top_p": 0.9}', others="model, openai or ")
    if unknown := [name for name in found if name not in RECOMMENDED]:
        raise ValueError(f"it sets {unknown[0]!r}, but can set {', '.join(RECOMMENDED)}")
    try:
        return checked_defaults(found)
    except InvalidRequest as error:
        raise ValueError(str(error).removesuffix(".")) from error


def _object(value: Any, example: str, others: str = "") -> Mapping[Any, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise ValueError(f"it must be {others}a JSON object such as {example}")
    return value


def comma_separated(value: Any) -> Any:
    """A text, or several, as their parts between commas."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise ValueError("it must be a text, or several with commas between them")
    found = [key.strip() for item in values for key in item.split(",") if key.strip()]
    if not found and value != []:  # an unset variable on the command line must not open the server to everyone
        raise ValueError("it is given, but empty")
    return found


def web_origins(value: Any) -> Any:
    """As browsers write them: what is written otherwise would allow nobody."""
    found = comma_separated(value)
    for origin in found:
        if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#A-Z*\s]+", origin):
            raise ValueError(
                f"{origin!r} is no origin: write it as browsers do, such as https://app.example or "
                "http://localhost:3000, in small letters and without a path; * is all of them"
            )
    return found
