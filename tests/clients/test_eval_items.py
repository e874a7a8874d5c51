"""Rows of the evaluation sets: reading, refusing and scoring them."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamburger.clients.evaluation.errors import EvalError
from hamburger.clients.evaluation.ifeval_text import TextTools
from hamburger.clients.evaluation.items import TASKS, Problem, Question, final_number, read_items, score

DATA = Path(__file__).parents[1] / "data" / "eval"
ROWS: dict[str, dict[str, Any]] = {
    "ifeval": {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "gsm8k": {"question": "1 + 1?", "final": "2"},
    "piqa": {"query": "Question: Why?\n", "choices": ["So.", "Thus."], "gold": 0},
}


@pytest.mark.parametrize("name", TASKS)
def test_the_rows_are_read(name: str) -> None:
    items = read_items(DATA, TASKS[name])
    assert len(items) == {"ifeval": 12, "gsm8k": 5, "arc_easy": 6, "piqa": 5}[name]
    assert read_items(DATA, TASKS[name], limit=2) == items[:2]
    assert len({item.id for item in items}) == len(items)


def test_a_question_is_asked_as_lm_eval_asks_it() -> None:
    arc, piqa = (read_items(DATA, TASKS[name])[0] for name in ("arc_easy", "piqa"))
    assert isinstance(arc, Question)
    assert isinstance(piqa, Question)
    assert arc.context.endswith("the foundation of most food webs?\nAnswer:")
    assert piqa.context == "Question: dresser\nAnswer:"
    assert piqa.choices[piqa.gold] == "finish, woodgrain with  bobby pin"


def test_choices_are_scored_by_likelihood_and_by_likelihood_per_character() -> None:
    task = TASKS["arc_easy"]
    by_length = Question("q", "c", ("a", "a longer one"), 1)
    assert score(task, by_length, [-2.0, -6.0], None) == {"acc": 0, "acc_norm": 1}
    characters_count = Question("q", "c", ("aaa", "°°"), 0)  # 3 and 2 characters, 3 and 4 bytes
    assert score(task, characters_count, [-3.3, -3.0], None) == {"acc": 0, "acc_norm": 1}
    ties_go_to_the_first = Question("q", "c", ("ab", "cd"), 0)
    assert score(task, ties_go_to_the_first, [-1.0, -1.0], None) == {"acc": 1, "acc_norm": 1}


def test_an_instruction_scores_only_when_all_are_followed() -> None:
    task, tools = TASKS["ifeval"], TextTools()
    row = {"prompt": "p", "instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    item = task.parse(row, "x")
    answers = {'"No."': 1, "No.": 0, '"Yes, one."': 0, "": 0}
    assert {answer: score(task, item, answer, tools)["prompt_strict"] for answer in answers} == answers


def test_a_text_scores_no_question() -> None:
    with pytest.raises(TypeError, match="Question cannot be scored by str"):
        score(TASKS["piqa"], Question("q", "c", ("a", "b"), 0), "a", None)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes $18 every day.", 18),
        ("So 5 * 3 = 15.\n#### 15", 15),
        ("#### **1,234.50** dollars, which is 2 more", Decimal("1234.5")),
        ("#### Step 3: add\nThe total is $70,000.", 70000),  # a heading of Markdown is no mark
        ("#### 3\nbut no: #### 4", 4),
        ("9 - 3 = 6 and 10-3", 3),
        ("the change is -$7", -7),
        ("it is −2", -2),
        (r"\boxed{42}", 42),
        ("1, 2,3", 3),
        ("18.00", 18),
        ("many", None),
        ("", None),
    ],
)
def test_the_final_number(text: str, number: int | Decimal | None) -> None:
    assert final_number(text) == number


@given(st.text(st.sampled_from("0123456789,.$-#* \nax٣")))
def test_any_text_has_a_final_number_or_none(text: str) -> None:
    found = final_number(text)
    assert (found is not None) == any(c.isdigit() for c in text)


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "${}.", "{:,}", "The answer is {:,}!", "7\n#### {}"]))
def test_a_number_is_found_as_it_was_written(number: int, form: str) -> None:
    assert final_number(form.format(number)) == number


def test_the_reference_answers_of_gsm8k_are_right() -> None:
    task = TASKS["gsm8k"]
    rows = [json.loads(line) for line in gzip.decompress((DATA / "gsm8k_test.jsonl.gz").read_bytes()).splitlines()]
    for item, row in zip(read_items(DATA, task), rows, strict=True):
        assert isinstance(item, Problem)
        assert score(task, item, row["answer"], None) == {"exact_match": 1}
        assert score(task, item, f"{row['final']}1", None) == {"exact_match": 0}


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / f"{TASKS[name].file}.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ifeval", {"kwargs": []}, "instruction_id_list and kwargs must be lists of one length"),
        ("ifeval", {"kwargs": [3]}, "kwargs must hold one JSON object for each"),
        ("ifeval", {"instruction_id_list": ["x:y"]}, "instruction_id_list names 'x:y': the 25 known"),
        ("ifeval", {"prompt": " "}, "prompt is ' ': write some text"),
        ("gsm8k", {"final": 3}, "final is 3: write the right number as text"),
        ("gsm8k", {"final": "many"}, "final is 'many'"),
        ("gsm8k", {"question": None}, "question is None: write some text"),
        ("piqa", {"choices": ["one"]}, "choices must be a list of two texts or more"),
        ("piqa", {"choices": ["one", ""]}, "choices must be a list of two texts or more"),
        ("piqa", {"gold": 2}, "gold is 2: write the index of the right choice, 0 to 1"),
        ("piqa", {"gold": True}, "gold is True: write the index"),
        ("piqa", {"query": 1}, "query is 1: write some text"),
    ],
)
def test_a_wrong_row_is_named_with_its_line_and_field(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, name, json.dumps(ROWS[name]), "", json.dumps({**ROWS[name], **change}))
    with pytest.raises(EvalError, match=rf"{TASKS[name].file}\.jsonl, line 3: {message}"):
        read_items(tmp_path, TASKS[name])


def test_rows_without_ids_are_named_by_their_line(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k", json.dumps(ROWS["gsm8k"]), json.dumps({**ROWS["gsm8k"], "id": 7}))
    assert [item.id for item in read_items(tmp_path, TASKS["gsm8k"])] == ["line-1", "7"]


def test_a_wrong_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    task = TASKS["gsm8k"]
    with pytest.raises(EvalError, match=r"holds no gsm8k_test\.jsonl\.gz: put it there, or leave gsm8k out"):
        read_items(tmp_path, task)
    write(tmp_path, "gsm8k", "\n")
    with pytest.raises(EvalError, match="holds no rows"):
        read_items(tmp_path, task)
    write(tmp_path, "gsm8k", "{")
    with pytest.raises(EvalError, match="line 1: "):
        read_items(tmp_path, task)
    write(tmp_path, "gsm8k", "[]")
    with pytest.raises(EvalError, match="line 1: expected a JSON object"):
        read_items(tmp_path, task)
    write(tmp_path, "gsm8k", "[" * 100_000 + "]" * 100_000)
    with pytest.raises(EvalError, match="line 1: its lists or objects are nested too deeply"):
        read_items(tmp_path, task)
    write(tmp_path, "gsm8k", json.dumps({**ROWS["gsm8k"], "question": "\ud83d"}))
    with pytest.raises(EvalError, match=r"line 1: it holds \\ud83d, half of a surrogate pair"):
        read_items(tmp_path, task)
    row = json.dumps({**ROWS["gsm8k"], "id": "one"})
    write(tmp_path, "gsm8k", row, row)
    with pytest.raises(EvalError, match="line 2: id 'one' came before"):
        read_items(tmp_path, task)
    packed = tmp_path / "gsm8k_test.jsonl.gz"
    for data in (b"no gzip", gzip.compress(b"x" * 100)[:-12], gzip.compress(b"\xff")):
        packed.write_bytes(data)
        with pytest.raises(EvalError, match=r"gsm8k_test\.jsonl\.gz cannot be read: .*Copy the file again"):
            read_items(tmp_path, task)
