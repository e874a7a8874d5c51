"""benchmarks/settled_tasks.py: how answers are scored, and how whole and settled ones are compared."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hamburger.engine.types.settling import Settling
from settled_tasks import Answered, compared, table
from tasks.asked import Task, read_tasks, rouge_l
from tasks.following import share_followed

WORDS = "length_constraints:number_words"


@pytest.mark.parametrize(
    ("name", "fields", "right", "wrong"),
    [
        ("punctuation:no_comma", {}, "One and two.", "One, two."),
        (WORDS, {"relation": "at least", "num_words": 3}, "one two three", "one two"),
        (WORDS, {"relation": "less than", "num_words": 3}, "one two", "one two three"),
        ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "A b. C!", "A b. C"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
        ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat; a dog.", "A category; a dog."),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a cat"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "A b a", "a bat"),
        ("keywords:letter_frequency", {"letter": "Z", "let_frequency": 2, "let_relation": "less than"}, "z", "zZ"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and b*"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a"),
        ("detectable_format:title", {}, "<<A title>>\ntext", "A title\ntext"),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1'),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[name]", "name"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Yours.\np.s. More", "Yours."),
        ("change_case:english_lowercase", {}, "all low", "Not low"),
        ("change_case:english_capital", {}, "ALL UP", "NOT Up"),
        ("startend:quotation", {}, ' "so" ', '"so'),
        ("startend:end_checker", {"end_phrase": "That is all."}, "Well. That is all. ", "That is all. Well."),
    ],
)
def test_an_instruction_is_followed_or_not(name: str, fields: dict[str, object], right: str, wrong: str) -> None:
    assert share_followed(right, [name], [fields]) == 1
    assert share_followed(wrong, [name], [fields]) == 0


def test_shares_are_of_the_instructions_that_can_be_checked() -> None:
    names = ["punctuation:no_comma", "change_case:english_lowercase", "language:response_language"]
    assert share_followed("a, b", names, [{}, {}, {"language": "kn"}]) == 0.5
    assert share_followed("a, b", names[2:], [{"language": "kn"}]) is None


def test_rouge_counts_the_longest_common_subsequence() -> None:
    assert rouge_l("the cat sat", "The cat sat!") == 1
    assert rouge_l("the cat sat down", "a cat lay down") == pytest.approx(2 * 2 / 8)
    assert rouge_l("", "a") == 0


def test_tasks_are_read_and_scored(tmp_path: Path) -> None:
    rows: dict[str, list[dict[str, object]]] = {
        "eval/gsm8k_test.jsonl.gz": [{"question": "1,000 + 1?", "final": "1,001"}],
        "eval/ifeval.jsonl.gz": [
            {"prompt": "In Kannada", "instruction_id_list": ["language:response_language"], "kwargs": [{}]},
            {"prompt": "No commas", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        ],
        "eval/spec_bench.jsonl.gz": [
            {"category": "math", "turns": ["x"], "reference": []},
            {"category": "summarization", "turns": ["Summarize: x"], "reference": ["the cat"]},
        ],
        "prompts/context_qa_stories.jsonl.gz": [{"category": "story_continuation", "prompt": "Once"}],
        "eval/mt_bench.jsonl": [{"turns": ["first", "second"]}],
    }
    for name, of in rows.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        lines = "".join(json.dumps({"id": f"{name}-{i}", **row}) + "\n" for i, row in enumerate(of)).encode()
        file.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    tasks = read_tasks(tmp_path, 5)
    assert [task.kind for task in tasks] == ["gsm8k", "ifeval", "summary", "story", "second turn"]
    gsm8k, ifeval, summary, story, second = tasks
    assert gsm8k.score("1,000 plus 1: the answer is 1,001.") == 1
    assert gsm8k.score("the answer is 7, not 1,001") == 0
    assert gsm8k.score("none") == 0
    assert ifeval.score("a") == 1
    assert summary.score("the cat") == 1
    assert story.score("x") is None
    assert second.turns == ["first", "second"]


def test_only_answers_beyond_the_window_are_compared() -> None:
    tasks = [Task("story", ["x"], lambda answer: None)] * 2 + [Task("gsm8k", ["y"], lambda answer: 1.0)]
    whole = [Answered(400, 400, None, 1.0, 0.5), Answered(100, 100, None, 9.0, 0.9), Answered(300, 300, 1.0, 2.0, 0.7)]
    settled = [
        Answered(300, 150, None, 1.5, 0.6),
        Answered(100, 100, None, 9.0, 0.9),
        Answered(300, 150, 0.0, 2.5, 0.9),
    ]
    story, gsm8k, everything = compared(Settling(192, 1 / 8), tasks, whole, settled)
    assert (story["kind"], story["answers"], story["tokens"], story["tokens_per_kv"]) == ("story", 1, [400, 300], 2)
    assert story["score"] is None
    assert story["nats"] == {"whole": 1.0, "settled": 1.5, "low": 0.5, "high": 0.5}
    assert gsm8k["score"] == {"whole": 1.0, "settled": 0.0, "low": -1.0, "high": -1.0}
    assert (everything["kind"], everything["answers"], everything["score"]) == ("all", 2, None)
    assert "| 192 | 0.33 | 0.125 | story | 1 | 400 | 300 | 2.00 |  |  | 1.000 | +0.500 [+0.500, +0.500] |" in table(
        [story]
    )
