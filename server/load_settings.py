"""Where settings of `hamburger serve` come from: command line > environment > YAML file > default (config.py)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hamburger.server.config import ENV_PREFIX, ServeSettings, SettingsError, first_fault


class _UniqueKeys(yaml.SafeLoader):
    """Plain values alone; of a key that is there twice the library's loader would take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # before `<<` brings others' keys, which may be there too
        names = [str(key.value) for key, _ in node.value if key.value != "<<"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.composer.ComposerError(None, None, f"{name} is there twice", node.start_mark)
        return node


def load_settings(given: Mapping[str, Any], config_file: str | None = None) -> ServeSettings:
    """Settings from the command line's values, the environment and a YAML file (or the one HAMBURGER_CONFIG names).

    Raises SettingsError.
    """
    if config_file == "":
        raise SettingsError("--config is empty: name a YAML file, or leave it out.")
    _check_variables()
    config_file = config_file or os.environ.get(f"{ENV_PREFIX}CONFIG") or None
    from_file = {} if config_file is None else _read_yaml(Path(config_file))
    in_environment = {name for name in ServeSettings.model_fields if os.environ.get(_variable(name))}
    # What the environment sets is left out here, because what is handed in would win over it.
    chosen = {name: value for name, value in from_file.items() if name not in in_environment} | dict(given)
    try:
        return ServeSettings(**chosen)
    except ValidationError as error:
        name, given_value, reason = first_fault(error)
        if name in given:
            written = f"--{name.replace('_', '-')}"
        else:
            written = _variable(name) if name in in_environment else f"{name} in {config_file}"
        if isinstance(given_value, list) and len(given_value) == 1:
            given_value = given_value[0]  # as it was written
        value = "a secret" if name == "api_key" else repr(given_value)
        raise SettingsError(f"{written} is {value}: {reason}") from error


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _check_variables() -> None:
    """Raises SettingsError for a variable that is a setting's but for a slip. Others are left alone: Kubernetes gives
    some to a service of this name."""
    known = [*map(_variable, ServeSettings.model_fields), f"{ENV_PREFIX}CONFIG"]
    for name in sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known):
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.93):
            raise SettingsError(f"{name} in the environment is no setting: did you mean {near[0]}?")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = _UniqueKeys(path.read_text(encoding="utf-8")).get_single_data()
    except (OSError, ValueError) as error:
        raise SettingsError(f"the configuration file {path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"the configuration file {path} is not YAML: {' '.join(str(error).split())}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"the configuration file {path} must hold `name: value` lines.")
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    if len(settings) < len(content):
        raise SettingsError(f"the configuration file {path} has a setting twice, with - and with _: leave one out.")
    for name in settings:
        if name not in ServeSettings.model_fields:
            near = difflib.get_close_matches(name, ServeSettings.model_fields, n=1)
            hint = f": did you mean {near[0]}?" if near else f". Known are {', '.join(ServeSettings.model_fields)}."
            raise SettingsError(f"{path} has the unknown key {name!r}{hint}")
    return settings
