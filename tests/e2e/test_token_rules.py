"""allowed_token_ids and bad_words on a real model: they hold, and drafts change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from real_server import RealServer

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Name the capital of France, and tell me of it."}]


def answer(server: RealServer, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 48, **fields}
    whole = server.post(CHAT, body).json()
    return whole["choices"][0]["message"]["content"], whole["usage"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
def test_a_bad_word_never_comes_and_drafts_change_nothing(embedded: RealServer, sampling: dict[str, Any]) -> None:
    words = ["Paris", "France", "city of"]
    plain, _ = answer(embedded, **sampling)
    assert any(word in plain for word in words)
    fast, usage = answer(embedded, bad_words=words, **sampling)
    slow, slow_usage = answer(embedded, bad_words=words, confidence=1, **sampling)
    assert fast == slow
    assert not any(word in fast for word in words)
    assert usage["macro_steps"] <= slow_usage["macro_steps"]  # whether drafts pay is the machine's to say


def test_an_answer_is_made_of_what_is_allowed(embedded: RealServer) -> None:
    digits = [embedded.post("/tokenize", {"prompt": str(digit)}).json()["tokens"] for digit in range(10)]
    assert all(len(ids) == 1 for ids in digits)
    allowed = [ids[0] for ids in digits]
    fast, _ = answer(embedded, allowed_token_ids=allowed)
    slow, usage = answer(embedded, allowed_token_ids=allowed, confidence=1)
    assert fast == slow
    assert fast.isdigit()
    assert usage["completion_tokens"] == 48  # no end token is among them
    nines, _ = answer(embedded, allowed_token_ids=allowed, bad_words=list("012345678"))
    assert nines == "9" * 48


def test_beside_a_grammar(embedded: RealServer) -> None:
    first, _ = answer(embedded, regex="[A-Za-z]{3,9}")
    second, _ = answer(embedded, regex="[A-Za-z]{3,9}", bad_words=[first])
    assert first != second
    assert second.isalpha()
    # A word is known by its tokens: where the grammar leaves nothing but its last one, the answer is at its end.
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 9, "regex": "Lyon", "bad_words": ["Lyon"]}
    refused = embedded.post(CHAT, body)
    assert refused.status_code == 400
    assert "bad_words" in refused.json()["error"]["message"]
