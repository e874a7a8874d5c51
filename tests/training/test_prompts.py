"""Prompt files and the held-out split."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamburger.training.corpus.prompts import Prompt, is_held_out, is_kept_back, read_prompts
from hamburger.training.errors import TrainingError


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_both_forms_of_prompts(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "x"}]
    path = write(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "Hello", "category": "chat", "response": "ignored"},
        {"messages": chat},
        {"id": 7, "prompt": ""},
    )
    assert list(read_prompts([path])) == [
        Prompt("a", [{"role": "user", "content": "Hello"}], "chat"),
        Prompt("line-2", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], None),
        Prompt("7", [{"role": "user", "content": ""}], None),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "a"}, 'line 1 has neither "prompt" nor "messages"'),
        ({"id": ["a"], "prompt": "x"}, 'line 1: "id" must be a text'),
        ({"id": "", "prompt": "x"}, 'line 1: "id" must be a text'),
        ({"prompt": 3}, 'line 1: "prompt" must be a text, not 3'),
        ({"messages": []}, "at least one message"),
        ({"messages": "x"}, "at least one message"),
        ({"messages": [{"role": "user"}]}, 'message 0 must have "role" and "content"'),
        ({"messages": [{"role": "user", "content": "x"}, "y"]}, "message 1 must have"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing to answer"),
        ({"prompt": "a \ud800"}, 'line 1: "prompt" has half of a surrogate pair'),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "line 1: message 0 has half of a surrogate pair"),
        ({"messages": [{"role": "u\ud800", "content": "x"}]}, "line 1: message 0's role has half of a surrogate pair"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        list(read_prompts([write(tmp_path / "p.jsonl", row)]))


def test_an_id_comes_once_over_all_files(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, {"prompt": name}) for name in ("1.jsonl", "2.jsonl"))
    with pytest.raises(TrainingError, match=r'2\.jsonl, line 1: the id "line-1" is that of .*1\.jsonl, line 1 too'):
        list(read_prompts([one, two]))


@given(st.text(), st.floats(0, 1))
def test_the_split_is_the_published_one(id: str, fraction: float) -> None:
    share = int(hashlib.sha256(id.encode()).hexdigest()[:8], 16) / 2**32
    assert is_held_out(id, fraction) == (share < fraction)
    assert not is_held_out(id, 0)
    assert is_held_out(id, 1)


def test_what_is_kept_back_for_validation_is_another_split_than_the_held_out() -> None:
    ids = [f"prompt-{i}" for i in range(20_000)]
    left = [id for id in ids if not is_held_out(id, 0.3)]
    kept = sum(is_kept_back(id, 0.3) for id in left)
    assert 0.28 < kept / len(left) < 0.32


def test_the_split_has_its_share() -> None:
    held_out = sum(is_held_out(f"prompt-{i}") for i in range(20_000))
    assert 700 <= held_out <= 900
