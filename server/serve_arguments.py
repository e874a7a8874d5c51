"""The options of `hamburger serve`, one for each setting, and how its help shows them."""

from __future__ import annotations

import argparse
from typing import Literal, get_args, get_origin

from hamburger.server.config import ENV_PREFIX, ServeSettings

# The groups of options in the help of `serve`, by the first setting of each.
GROUPS = {
    "model": "model, device and memory",
    "groups": "groups and settled slots",
    "max_loras": "adapters, queue and steps",
    "served_model_name": "names, and further models",
    "host": "address, keys and the web page",
    "confidence": "confidence",
    "response_store": "limits of requests and connections",
    "compact_json": "templates, tools, JSON and sampling",
    "drain_seconds": "ending, logs and traces",
}


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ServeSettings; only those that are given reach the namespace."""
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with settings (also {ENV_PREFIX}CONFIG)")
    group: argparse._ArgumentGroup | argparse.ArgumentParser = parser
    for name, field in ServeSettings.model_fields.items():
        if title := GROUPS.get(name):
            group = parser.add_argument_group(title)
        help_text = str(field.description)
        if field.default not in (None, [], {}):
            help_text += f" (default: {_written(name, field.default)})"
        option = f"--{name.replace('_', '-')}"
        action = "append" if name in ("api_key", "also", "lora") else "store"
        metavar = {"also": "NAME=MODEL", "lora": "NAME=PATH"}.get(name, name.rsplit("_")[-1].upper())
        if field.annotation is bool:
            metavar = "true|false"
        elif get_origin(field.annotation) is Literal:
            metavar = "|".join(get_args(field.annotation))
        group.add_argument(option, dest=name, action=action, metavar=metavar, help=help_text)
        if name == "playground":
            short = "the same as --playground false"
            group.add_argument("--no-playground", dest=name, action="store_const", const="false", help=short)


def _written(name: str, default: object) -> str:
    """A default as one would write it."""
    if isinstance(default, bool):
        return str(default).lower()
    if name in ("response_store", "max_body_size") and isinstance(default, int):
        return f"{default >> 20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)
