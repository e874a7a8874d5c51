"""What benchmarks/drafts.py makes of answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import drafts
from drafts import Answer, Task
from hamburger.engine.types.messages import CheckedDrafts
from hamburger.training.quality.prompts import Prompt


def answer_of(
    tokens: list[int], sizes: list[int], seconds: float, checked: list[CheckedDrafts] | None = None
) -> Answer:
    return Answer(tokens, [(size, seconds) for size in sizes], checked or [])


def test_a_row_for_each_kind_and_one_for_all() -> None:
    tasks = [Task(Prompt("a", "maths", [1])), Task(Prompt("b", "editing", [1]))]
    checked = [CheckedDrafts("micro", [1, 2, 3], [0.9, 0.8, 0.7], 2), CheckedDrafts("lookup", [5], [0.5], 0)]
    text = [0, 1, 2, 3, 4]
    pairs = [
        (answer_of(text, [1, 1, 1, 1], 0.01), answer_of(text, [3, 1], 0.01, checked)),
        (answer_of(text, [1, 1, 1, 1], 0.01), answer_of([0, 1, 2, 3, 9], [2, 2], 0.02)),
    ]
    maths, editing, every = drafts.report(0.7, tasks, pairs)
    assert (maths["kind"], editing["kind"], every["kind"]) == ("maths", "editing", "all")
    assert (maths["same"], editing["same"]) == (1, 0)
    assert every["answers"] == 1  # the kinds of eval-quality alone
    assert (maths["tokens_per_step"], maths["drafts_per_step"], maths["accepted_per_step"]) == (2.0, 2.0, 1.0)
    assert maths["speed_over_1"] == pytest.approx(2.0)
    assert editing["speed_over_1"] == pytest.approx(1.0)
    assert maths["straight_tokens_per_step"] == 2.0


def test_what_an_answer_says_before_it_goes_round_in_circles() -> None:
    circle = [1, 2, 3, 4, 5, 6, 7, 8]
    answer = answer_of([9, *circle, *circle], [4, 3, 5, 4], 0.1)
    assert answer.uncircular == [(4, 0.1), (3, 0.1)]  # the third group reaches into the second round
    assert answer_of([9, *circle], [4, 4], 0.1).uncircular == [(4, 0.1), (4, 0.1)]


def test_places_are_those_whose_forerunners_were_accepted() -> None:
    checked = [CheckedDrafts("micro", [1, 2, 3], [0.95, 0.85, 0.75], 1), CheckedDrafts("micro", [1], [0.95], 1)]
    first, second = drafts.places(0.0, [answer_of([0], [1], 0.1, checked)])
    assert (first["place"], first["drafts"], first["accepted"]) == (1, 2, 1.0)
    assert (second["place"], second["drafts"], second["accepted"]) == (2, 1, 0.0)
    assert first["calibration_error"] == pytest.approx(0.05)
    assert second["calibration_error"] == pytest.approx(0.85)


def test_bins_are_told_apart() -> None:
    # Right in the mean, and wrong in each bin.
    assert drafts.calibration_error([(0.25, True), (0.75, False)]) == pytest.approx(0.75)


def test_edits_are_held_out_functions_under_another_name(tmp_path: Path) -> None:
    file = tmp_path / "code.jsonl"
    rows = [
        {"id": f"r{i}", "source": "s", "prompt": "p", "response": f"def name_{i}(x):\n    return x\n"}
        for i in range(200)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(drafts.edits([file], 2, lambda messages: [len(messages)], lambda text: [len(text)]))
    assert [task.kind for task in found] == ["editing", "editing, predicted"] * 2
    assert all(bool(task.prediction_ids) == (task.kind == "editing, predicted") for task in found)
    with pytest.raises(SystemExit, match="only"):
        list(drafts.edits([file], 200, lambda messages: [1], lambda text: [1]))
