"""`hamburger serve --confidence auto` as a process: what it says, whom it chooses for, and that it changes no text."""

from __future__ import annotations

from pathlib import Path

import pytest

from hamburger.server.cli import main
from real_server import RealServer
from slow_cases import slow

BODY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
PATH = "/v1/completions"


@pytest.mark.slow
def test_it_says_its_bounds_and_begins_at_the_upper_one(grafted: RealServer, grafted_folder: Path) -> None:
    options = ["--served-model-name", "burger", "--dtype", "float32", "--kv-cache-memory", "64MiB"]
    auto = ["--confidence", "auto", "--target-tpot-ms", "60000", "--min-confidence", "0.1"]
    with RealServer(str(grafted_folder), *options, *auto) as server:
        assert "confidence 0.4, under load down to 0.1 to hold 60000 ms a token" in server.log()
        chosen = server.post(PATH, BODY).json()
        assert chosen["usage"]["confidence"] == 0.4
        assert server.metric("hamburger_confidence_in_force") == 0.4
        assert server.post(PATH, BODY | {"confidence": 0.9}).json()["usage"]["confidence"] == 0.9
        assert server.post(PATH, BODY | {"seed": 1}).json()["usage"]["confidence"] == 0.4
    plain = grafted.post(PATH, BODY).json()
    assert "confidence" not in plain["usage"]
    assert chosen["choices"][0]["text"] == plain["choices"][0]["text"]
    assert chosen["usage"]["kv_slots"] == plain["usage"]["kv_slots"]


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        slow("builtin", [], "is a plain base model"),
        (None, ["--min-confidence", "0.5"], "min_confidence is 0.5: it must be below 0.4"),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused_at_start(
    model: str | None, options: list[str], said: str, grafted_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["--quantization", "none", "--max-model-len", "64", "--kv-cache-memory", "64MiB", "--port", "0"]
    auto = ["--confidence", "auto", "--target-tpot-ms", "40", *options]
    assert main(["serve", model or str(grafted_folder), *small, *auto]) == 2
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1
