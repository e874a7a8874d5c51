"""Plans of small models, by function and by command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hamburger.engine.plan.plan import Load, Machine, Plan, make_plan
from hamburger.engine.plan.shape import Shape
from hamburger.model.config import ModelConfig
from hamburger.server.cli import main
from small_models import graft_config, trunk_config

PLAIN = ModelConfig(trunk=trunk_config())
GRAFTED = ModelConfig(trunk=trunk_config(), graft=graft_config())
POOL = ["--kv-cache-memory", "1GiB"]


def command(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What `hamburger plan --json` prints."""
    assert main(["plan", *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that it prints instead."""
    try:
        code: object = main(["plan", *options])
    except SystemExit as stop:  # a wrong option
        code = stop.code
    assert code == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.count("\n") == 1
    return error


def plan(shape: Shape, **fields: Any) -> Plan:
    machine = {name: fields.pop(name) for name in list(fields) if name in Machine.__dataclass_fields__}
    return make_plan(shape, Machine(**machine), Load(**{"prompt_tokens": 100, "output_tokens": 60, **fields}))
