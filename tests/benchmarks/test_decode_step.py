"""benchmarks/decode_step.py on a tiny model: every form runs, and a line says what was measured."""

from __future__ import annotations

import json

import pytest

import decode_step
from hamburger.model.decode_graphs import FORMS


def test_a_line_for_each_number_of_rows_and_confidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "tiny", "--rows", "1,3", "--context", "70", "--confidences", "0,1", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", ["decode_step.py", *options])
    decode_step.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["rows"], line["confidence"], line["tokens_per_group"]) for line in lines] == [
        (1, 0, 4), (1, 1, 1), (3, 0, 4), (3, 1, 1),
    ]  # fmt: skip
    assert all(line["milliseconds"].keys() == {"eager", *FORMS} for line in lines)
    assert all(value > 0 for line in lines for value in line["milliseconds"].values())
