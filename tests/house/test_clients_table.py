"""docs/clients.md names the versions of others' programs that the tests run."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_versions_are_those_of_the_lock() -> None:
    lines = (ROOT / "deploy/clients-constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    document = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| [^|]+ \| `([^`]+)` \| ([0-9][^ ]*) \|", document, flags=re.MULTILINE)
    assert len(told) > 5
    assert {package: locked[package.replace("_", "-")] for package, _ in told} == dict(told)


def test_what_was_recorded_is_in_the_table() -> None:
    recorded = json.loads((ROOT / "tests/data/interop/recorded.json").read_text(encoding="utf-8"))
    document = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
    assert len(recorded) == 3
    for client in recorded:
        assert f"\n| {client['client']} | {client['version']} | " in document
