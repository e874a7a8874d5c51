"""CI's workflow runs .ci/run on every supported Python, within a time, with no more rights than it needs."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOW: dict[Any, Any] = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
JOB: dict[str, Any] = WORKFLOW["jobs"]["ci"]


def test_it_runs_what_must_hold() -> None:
    assert (ROOT / ".ci" / "run").is_file()
    assert JOB["steps"][-1]["run"] == "bash .ci/run"
    assert "continue-on-error" not in str(WORKFLOW)
    assert {"push", "pull_request"} <= set(WORKFLOW[True])  # YAML 1.1 reads `on` as true


def test_it_takes_every_supported_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert JOB["strategy"]["matrix"]["python"] == supported


def test_it_may_read_only_and_ends_in_time() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [step["with"]["persist-credentials"] for step in JOB["steps"] if "checkout" in step.get("uses", "")] == [
        False
    ]
    assert JOB["timeout-minutes"] <= 90
    assert WORKFLOW["concurrency"]["cancel-in-progress"] is True


def test_the_forms_ask_for_what_they_name() -> None:
    for form in ("bug", "feature"):
        body = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())["body"]
        fields = [field for field in body if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert any(field.get("validations", {}).get("required") for field in fields)
