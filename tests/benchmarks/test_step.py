"""benchmarks/step.py: what it makes of measured steps, and one run on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import step
from hamburger.engine.drafting.costs import MeasuredCosts
from step import AUTO, BASE, Measured, report, table


def test_ratios_are_of_one_round_and_the_micro_step_is_what_full_groups_add() -> None:
    found = []
    for round_, slow in enumerate((1.0, 2.0, 1.0)):  # a slower round changes no ratio
        for name, seconds, tokens in ((BASE, 1.0, 10), ("1", 1.1, 10), ("0.5", 1.2, 20), ("0", 1.4, 40)):
            found.append(Measured(2, round_, name, 5, slow * seconds, tokens, 10, 0, 0))
    rows = {row["name"]: row for row in report(found)}
    assert list(rows) == [BASE, "1", "0.5", "0"]
    assert rows["0.5"]["tokens_per_step"] == rows["0.5"]["tokens_per_kv"] == 2.0
    assert rows["0.5"]["over_base"] == pytest.approx([20 / 1.2 / 10] * 3)
    assert rows["0.5"]["over_1"] == pytest.approx([20 / 1.2 / (10 / 1.1)] * 3)
    r = (0.28 - 0.22) / 3 / 0.2
    assert rows["0.5"]["of_target"] == pytest.approx((20 / 1.2 / 10) / (2 / (1 + r)))
    assert rows["1"]["ms"] == pytest.approx(220)
    parts = " | ".join(["0.00"] * 7)
    ratios = "1.67 (1.67 to 1.67) | 1.83 (1.83 to 1.83)"
    assert f"| 2 | 0.5 | 240.00 | {parts} | 2.00 | 2.00 | 0.0 | 17 | {ratios} | 0.92 |" in table(report(found))


def test_drafts_are_measured_by_what_rows_and_micro_steps_cost() -> None:
    costs = MeasuredCosts((1, 2, 3), (10.0, 11.0, 12.0), (2.0, 2.0, 2.0))
    drafting = Measured(1, 0, AUTO, 10, 0.15, 20, 20, 10, 20)  # a draft and two micro-steps each
    found = [Measured(1, 0, BASE, 10, 0.1, 10, 10, 0, 0), Measured(1, 0, "1", 10, 0.1, 10, 10, 0, 0), drafting]
    row = report(found, costs)[-1]
    assert row["drafts_per_step"] == 1
    assert row["tokens_per_kv"] == 1
    assert row["of_target"] == pytest.approx((2 / 1.5) / (2 / (1.1 + 2 * 0.2)))


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["verified", "composed"])
def test_one_run_of_the_embedded_models(
    groups: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.json"
    options = ["--streams", "2", "--confidences", "0.5", "--steps", "2", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["step.py", "--groups", groups, *options])
    step.main()
    told = json.loads(out.read_text())
    by_name = {row["name"]: row for row in told["rows"]}
    assert by_name.keys() == ({BASE, "1", AUTO} if groups == "verified" else {BASE, "1", "0.5", "0"})
    assert by_name[BASE]["tokens_per_step"] == by_name["1"]["tokens_per_step"] == 1.0
    if groups == "verified":
        assert told["costs"]["rows"][0] == 1
        assert by_name[AUTO]["tokens_per_kv"] == 1.0
    else:
        assert by_name["0"]["tokens_per_kv"] == 4.0
    assert len(told["measured"]) == len(by_name)
    for measured in told["measured"]:
        assert min(measured["parts"][i] for i in (1, 2, 3, 4, 6)) > 0
        assert measured["bounds"]["linears"] > 0
        assert sum(measured["parts"]) == pytest.approx(measured["seconds"])
    assert "| 2 | base |" in capsys.readouterr().out
