"""evalplus's OpenAI backend writes programs for HumanEval problems from a local file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client_programs import ROOT, Clients
from real_server import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]
PROBLEMS = ROOT / "tests/data/interop/humaneval.jsonl"


@pytest.mark.parametrize("model", ["smollm2-135m-hamburger", "smollm2-135m-hamburger@0.5"])
def test_codegen(clients: Clients, burger: RealServer, tmp_path: Path, model: str) -> None:
    problems = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
    # Fields that evalplus wants before it generates, and reads only when it judges.
    judged = {"contract": "", "base_input": [], "plus_input": [], "atol": 0}
    local = tmp_path / "problems.jsonl"
    local.write_text("".join(json.dumps(problem | judged) + "\n" for problem in problems))
    clients.run(
        "evalplus.codegen", model, "humaneval", "--backend", "openai", "--base-url", f"{burger.url}/v1", "--greedy",
        "--root", str(tmp_path / "out"), HUMANEVAL_OVERRIDE_PATH=str(local),
    )  # fmt: skip
    (raw,) = tmp_path.rglob("*.raw.jsonl")
    answers = {row["task_id"]: row["solution"] for row in map(json.loads, raw.read_text().splitlines())}
    assert set(answers) == {problem["task_id"] for problem in problems}
    assert all("def " in answer for answer in answers.values())
