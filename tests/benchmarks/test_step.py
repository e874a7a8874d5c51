"""benchmarks/step.py: what it makes of measured steps, and one run on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import step
from step import BASE, Measured, report, table


def test_ratios_are_of_one_round_and_the_micro_step_is_what_full_groups_add() -> None:
    found = []
    for round_, slow in enumerate((1.0, 2.0, 1.0)):  # a slower round changes no ratio
        for name, seconds, tokens in ((BASE, 1.0, 10), ("1", 1.1, 10), ("0.5", 1.2, 20), ("0", 1.4, 40)):
            found.append(Measured(2, round_, name, 5, slow * seconds, tokens))
    rows = {row["name"]: row for row in report(found)}
    assert list(rows) == [BASE, "1", "0.5", "0"]
    assert rows["0"]["micro_step_over_base_step"] == pytest.approx((0.28 - 0.22) / 3 / 0.2)
    assert rows["0.5"]["tokens_per_kv"] == 2.0
    assert rows["0.5"]["over_base"] == pytest.approx([20 / 1.2 / 10] * 3)
    assert rows["0.5"]["of_target"] == pytest.approx((20 / 1.2 / 10) / (2 / 1.1))
    assert rows["1"]["ms"] == pytest.approx(220)
    parts = "0.00 | 0.00 | 0.00 | 0.00"
    assert f"| 2 | 0.5 | 240.00 | {parts} | 2.00 | 17 | 1.67 (1.67 to 1.67) | 0.92 | 0.100 |" in table(report(found))


@pytest.mark.slow
def test_one_run_of_the_embedded_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.json"
    options = ["--streams", "2", "--confidences", "0.5", "--steps", "2", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["step.py", *options])
    step.main()
    told = json.loads(out.read_text())
    assert {row["name"]: row["tokens_per_kv"] for row in told["rows"]}.keys() == {BASE, "1", "0.5", "0"}
    by_name = {row["name"]: row for row in told["rows"]}
    assert by_name[BASE]["tokens_per_kv"] == by_name["1"]["tokens_per_kv"] == 1.0
    assert by_name["0"]["tokens_per_kv"] == 4.0
    assert len(told["measured"]) == 4
    for measured in told["measured"]:
        assert min(measured["parts"][1:]) > 0
        assert sum(measured["parts"]) == pytest.approx(measured["seconds"])
    assert "| 2 | base |" in capsys.readouterr().out
