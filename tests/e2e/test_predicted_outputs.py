"""The openai client against a real server with verified groups: the same answers, drafts told, Predicted Outputs.

The model is small and random, so that a row more costs next to nothing on any machine, and drafts always pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from real_server import RealServer

WORDS = "the of and to in is that for it was on are as with his they at be this have from or had by"


@pytest.fixture(scope="module")
def verified(grafted_folder: Path) -> Iterator[RealServer]:
    options = ("--served-model-name", "burger", "--dtype", "float32", "--kv-cache-memory", "64MiB")
    with RealServer(str(grafted_folder), "--groups", "verified", *options) as server:
        yield server


class Asked:
    """One question, whose answer is 64 common words in an order of their own: a text that has one tokenization."""

    def __init__(self, server: RealServer) -> None:
        ids = [
            server.post("/tokenize", {"prompt": f" {word}", "add_special_tokens": False}).json()
            for word in WORDS.split()
        ]
        self._create: Any = server.client.chat.completions.create
        self._fields: dict[str, Any] = {
            "model": "burger",
            "messages": [{"role": "user", "content": "Say something."}],
            "logit_bias": {str(tokens["tokens"][0]): 100 for tokens in ids},
            "temperature": 1,
            "seed": 11,
            "max_tokens": 64,
        }
        self.plain = text_of(self.whole(extra_body={"confidence": 1}))

    def whole(self, **further: Any) -> ChatCompletion:
        answer: ChatCompletion = self._create(**self._fields, **further)
        return answer

    def streamed(self, **further: Any) -> list[ChatCompletionChunk]:
        options = {"include_usage": True}
        return list(self._create(**self._fields, stream=True, stream_options=options, **further))


@pytest.fixture(scope="module")
def asked(verified: RealServer) -> Asked:
    return Asked(verified)


def text_of(answer: ChatCompletion | list[ChatCompletionChunk]) -> str:
    if isinstance(answer, ChatCompletion):
        return answer.choices[0].message.content or ""
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def usage_of(answer: ChatCompletion | ChatCompletionChunk) -> dict[str, Any]:
    assert answer.usage is not None
    return answer.usage.model_dump()


def predicted(content: Any) -> Any:
    return {"type": "content", "content": content}


def test_it_says_at_start_what_groups_are(verified: RealServer) -> None:
    assert "HAMburger model: its own text, groups of up to 8 verified tokens, drafts where they pay" in verified.log()


def test_a_right_prediction_is_followed_and_told(asked: Asked) -> None:
    slow = usage_of(asked.whole(extra_body={"confidence": 1}))
    assert slow["macro_steps"] == slow["kv_slots"] == slow["completion_tokens"] == 64
    assert slow["tokens_per_step"] == slow["tokens_per_kv"] == 1.0
    assert slow["completion_tokens_details"] is None
    answer = asked.whole(prediction=predicted(asked.plain))
    assert text_of(answer) == asked.plain
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 32
    assert details.rejected_prediction_tokens is not None
    usage = usage_of(answer)
    assert usage["macro_steps"] < 32
    assert usage["tokens_per_step"] == pytest.approx(64 / usage["macro_steps"], abs=1e-3)
    assert (usage["kv_slots"], usage["tokens_per_kv"]) == (64, 1.0)
    assert usage["prompt_tokens"] == slow["prompt_tokens"]


def test_streamed_groups_show_what_was_drafted_and_accepted(asked: Asked) -> None:
    *pieces, last = asked.streamed(prediction=predicted(asked.plain), extra_body={"return_groups": True})
    assert text_of(pieces) == asked.plain
    said = [piece.choices[0].model_dump() for piece in pieces]
    groups = [choice["group"] for choice in said if "group" in choice]
    assert [group["index"] for group in groups] == list(range(len(groups)))
    drafted = [group for group in groups if "drafted" in group]
    for group in drafted:
        accepted = group["accepted"]
        assert len(group["token_ids"]) == accepted + 1
        assert group["token_ids"][:accepted] == group["drafted"][:accepted]
        assert len(group["drafted"]) == len(group["chances"]) < 8
        assert group["drafter"] in ("micro", "lookup", "prediction")
    usage = usage_of(last)
    assert usage["macro_steps"] == len(groups)
    assert sum(group["accepted"] for group in drafted) == 64 - len(groups)
    of_prediction = [group for group in drafted if group["drafter"] == "prediction"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == sum(group["accepted"] for group in of_prediction)
    told = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert told == sum(len(group["drafted"]) for group in of_prediction)
    whole = asked.whole(extra_body={"return_groups": True}, prediction=predicted(asked.plain))
    tokens = [token for group in whole.choices[0].model_dump()["groups"] for token in group]
    assert tokens == [token for group in groups for token in group["token_ids"]]


@pytest.mark.parametrize("kind", ["nearly", "wrong", "parts"])
def test_no_prediction_changes_the_text(asked: Asked, kind: str) -> None:
    words = asked.plain.split(" ")
    contents = {
        "nearly": " ".join([*words[:20], "another", *words[21:40], *words[44:]]),
        "wrong": "Nothing of the kind. " * 20,
        "parts": [{"type": "text", "text": asked.plain[:100]}, {"type": "text", "text": asked.plain[100:]}],
    }
    chunks = asked.streamed(prediction=predicted(contents[kind]))
    assert text_of(chunks) == asked.plain
    details = usage_of(chunks[-1])["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"] > 20) == (kind != "wrong")
    assert (details["rejected_prediction_tokens"] > 0) or kind == "parts"


def test_what_is_refused_names_its_field(asked: Asked) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for beside, field in (({"n": 2}, "n"), ({"tools": tools}, "tools")):
        with pytest.raises(openai.BadRequestError) as refused:
            asked.whole(prediction=predicted("a"), **beside)
        assert refused.value.param == field
    with pytest.raises(openai.BadRequestError, match="the prediction has") as refused:
        asked.whole(prediction=predicted(asked.plain * 200))
    assert refused.value.param == "prediction"


def test_composed_groups_say_what_serves_it(grafted: RealServer) -> None:
    with pytest.raises(openai.BadRequestError, match="--groups verified") as refused:
        Asked(grafted).whole(prediction=predicted("a"))
    assert refused.value.param == "prediction"


def test_metrics_tell_of_the_drafts(verified: RealServer, asked: Asked) -> None:
    def total(name: str) -> float:
        lines = verified.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"hamburger_{name}_tokens_total")]
        return sum(float(line.rpartition(" ")[2]) for line in found if 'drafter="prediction"' in line)

    before = {name: total(name) for name in ("drafted", "accepted")}
    details = usage_of(asked.whole(prediction=predicted(asked.plain)))["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert total("accepted") - before["accepted"] == accepted > 0
    assert total("drafted") - before["drafted"] == accepted + rejected
