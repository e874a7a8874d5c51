"""Answers in all the forms in which they come."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.model.checkpoints.sources import BUILTIN
from hamburger.training.corpus.answers import WrittenAnswer, check_written_with, read_answers
from hamburger.training.corpus.conversation import prompt_ids
from hamburger.training.corpus.jsonl import GrowingFile
from hamburger.training.errors import TrainingError

END = 2
REAL = Tokenizer.load(BUILTIN)


def read(path: Path, *rows: dict[str, Any]) -> list[WrittenAnswer]:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return list(read_answers([path]))


def test_a_row_of_distill(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "Hi"}]
    [answer] = read(
        tmp_path / "a.jsonl",
        {
            "id": "a",
            "sample": 1,
            "category": "chat",
            "messages": user,
            "prompt_ids": [4, 5],
            "response": "x",
            "token_ids": [6, END],
            "finish_reason": "stop",
            "sampling": {"temperature": 0},
            "model": "m",
        },
    )
    place = f"{tmp_path / 'a.jsonl'}, line 1"
    assert answer == WrittenAnswer("a", 1, "chat", user, "x", [4, 5], [6, END], "stop", place)
    conversation = answer.tokenize(REAL, [END])
    assert conversation.token_ids == [4, 5, 6, END]
    assert conversation.response == [False, False, True, True]


def test_rows_with_a_prompt_and_without_ids(tmp_path: Path) -> None:
    ended, cut = read(
        tmp_path / "a.jsonl.gz",
        {"id": "a", "prompt": "Hi", "response": "Hello", "finish_reason": "stop", "sampling": "temperature 0.6"},
        {"id": "b", "prompt": "Hi", "response": "Hello", "finish_reason": "length"},
    )
    prompt, text = prompt_ids(REAL, [{"role": "user", "content": "Hi"}]), REAL.encode("Hello")
    assert ended.tokenize(REAL, [END]).token_ids == [*prompt, *text, END]
    assert cut.tokenize(REAL, [END]).token_ids == [*prompt, *text]
    assert sum(ended.tokenize(REAL, [END]).response) == len(text) + 1


def test_a_conversation_is_its_own_answer(tmp_path: Path) -> None:
    turns = [
        {"role": role, "content": content}
        for role, content in (("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2"))
    ]
    [answer] = read(tmp_path / "a.jsonl", {"messages": turns})
    assert (answer.id, answer.response, answer.finish_reason) == ("line-1", "2", "stop")
    assert answer.messages == turns[:3]
    assert answer.tokenize(REAL, [END], "last").num_response_tokens == 2
    assert answer.tokenize(REAL, [END], "all").num_response_tokens == 4


def test_an_id_or_category_of_any_characters_is_read(tmp_path: Path) -> None:
    """No tokenizer sees them, and `distill` writes what the prompts had."""
    row = {"id": "a\ud800", "category": "\udc00", "prompt": "Hi", "response": "x"}
    with GrowingFile(tmp_path / "a.jsonl") as file:
        file.append(row)
    [answer] = read_answers([tmp_path / "a.jsonl"])
    assert (answer.id, answer.category) == ("a\ud800", "\udc00")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response": None}, '"response" must be a text, not missing'),
        ({"response": "x\ud800"}, '"response" has half of a surrogate pair'),
        ({"finish_reason": "eos"}, '"finish_reason" must be "stop" or "length"'),
        ({"sample": -1}, '"sample" must be a whole number'),
        ({"token_ids": "1 2"}, '"token_ids" must be a list of token ids'),
        ({"messages": [{"role": "assistant", "content": "x"}], "response": None}, "begins with the answer"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=f"line 1.*{message}"):
        read(tmp_path / "a.jsonl", {"id": "a", "prompt": "Hi", "response": "x", **changes})


def test_an_answer_that_cannot_be_tokenized_is_named(tmp_path: Path) -> None:
    [answer] = read(tmp_path / "a.jsonl", {"prompt": "Hi", "response": "x", "token_ids": []})
    with pytest.raises(TrainingError, match=r"a\.jsonl, line 1: the answer has no token"):
        answer.tokenize(REAL, [END])


def test_ids_that_mean_another_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    user = [{"role": "user", "content": "Hi"}]
    ids = REAL.encode("Good day")
    part = REAL.encode("\U0001f99c")[0]  # of a character
    fine: list[dict[str, Any]] = [
        {"id": "a", "messages": user, "response": "Good day", "token_ids": [*ids, END]},
        {"id": "b", "messages": user, "response": "Good day<|im_end|>", "token_ids": [*ids, END]},
        {"id": "c", "messages": user, "response": " Good day\n", "token_ids": ids},
        {"id": "d", "messages": user, "response": "Good day", "token_ids": [*ids, part]},
        {"id": "e", "messages": user, "response": "of this only the text is known"},
        {"id": "f", "messages": user, "response": "", "token_ids": [END]},
    ]
    read(path, *fine)
    check_written_with(REAL, [path])
    read(path, *fine, {"id": "g", "messages": user, "response": "Good day", "token_ids": [i + 1 for i in ids]})
    with pytest.raises(TrainingError, match=r"a\.jsonl, line 7: token_ids are not those .* with --model, or leave"):
        check_written_with(REAL, [path])
