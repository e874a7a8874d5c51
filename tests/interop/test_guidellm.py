"""GuideLLM measures the server: every request succeeds, and it counts the tokens that it asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from client_programs import Clients
from hamburger.model.checkpoints.sources import BUILTIN
from real_server import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]
REQUESTS = 6


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_benchmark(clients: Clients, burger: RealServer, tmp_path: Path, route: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, tmp_path / name)
    clients.run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={burger.url},request_format={route}",
        "--tokenizer", f"kind=hf_auto,model={tmp_path}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={tmp_path / 'out.json'}",
        "--disable-console",
    )  # fmt: skip
    [found] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {
        "successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS,
    }  # fmt: skip
    answers: list[dict[str, Any]] = found["requests"]["successful"]
    assert all(0 < answer["time_to_first_token_ms"] <= 1000 * answer["request_latency"] for answer in answers)
    assert all(answer["output"] for answer in answers)
    if route == "/v1/completions":  # a chat's template adds tokens
        assert {answer["prompt_tokens"] for answer in answers} == {32}
    assert {answer["output_tokens"] for answer in answers} == {16}
