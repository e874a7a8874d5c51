"""Settled slots over HTTP: the embedded model on a real server, with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from real_server import RealServer

QUESTION: list[Any] = [{"role": "user", "content": "Write a long story about a lighthouse."}]


@pytest.fixture(scope="module")
def settling() -> Iterator[RealServer]:
    given = ["--settle", "true", "--max-model-len", "512", "--kv-cache-memory", "64MiB"]
    with RealServer(*given) as server:
        yield server


def ask(server: RealServer, **fields: Any) -> tuple[str, dict[str, Any]]:
    given = {"model": "smollm2-135m-hamburger", "messages": QUESTION, "max_tokens": 256, **fields}
    answer = server.client.chat.completions.create(**given)
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.model_dump()


def test_old_tokens_give_slots_back_and_usage_and_metrics_say_so(settling: RealServer) -> None:
    assert "its own text, but for old slots that settle, groups of up to 8 verified tokens" in settling.log()
    before = {name: settling.metric(f"hamburger_{name}_total") for name in ("settled_tokens", "dropped_slots")}
    text, usage = ask(settling, temperature=0, extra_body={"ignore_eos": True})
    # What suits the model: before its last token 192 were beyond 64, two chunks of 64, 21 of which have a slot.
    assert (usage["completion_tokens"], usage["kv_slots"]) == (256, 256 - 2 * 43)
    assert usage["tokens_per_kv"] == pytest.approx(256 / 170, abs=0.01)
    after = {name: settling.metric(f"hamburger_{name}_total") for name in before}
    assert {name: after[name] - before[name] for name in before} == {"settled_tokens": 128, "dropped_slots": 86}
    # Neither company nor streaming nor drafts change the text.
    with ThreadPoolExecutor(6) as pool:
        others = [
            pool.submit(ask, settling, temperature=t, seed=5, extra_body={"ignore_eos": True, "confidence": c})
            for t, c in ((0, 1.0), (0, 0.0), (0.8, 1.0), (0.8, 0.0), (0, 0.5), (0.8, 0.5))
        ]
        texts = [other.result()[0] for other in others]
    assert {texts[i] for i in (0, 1, 4)} == {text}
    assert len({texts[i] for i in (2, 3, 5)}) == 1


def test_a_request_may_keep_all_its_slots(settling: RealServer, embedded: RealServer) -> None:
    text, usage = ask(settling, temperature=0, extra_body={"settle": False})
    assert usage["kv_slots"] == usage["completion_tokens"]
    assert text == ask(embedded, temperature=0)[0]


def test_a_server_that_keeps_all_says_how_to_settle(embedded: RealServer) -> None:
    with pytest.raises(openai.BadRequestError, match="it must be started with settle on") as caught:
        ask(embedded, extra_body={"settle": True})
    assert caught.value.param == "settle"
