"""`hamburger eval-tasks` against a real HTTP server that is scripted: what it asks, keeps, scores and reports."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from eval_server import DATA, EvalServer, evaluate, report, text_logprob
from hamburger.clients import connection
from hamburger.clients.evaluation import command, requests
from hamburger.clients.evaluation.answers import Answer, AnswerStore, Usage, busy_seconds
from hamburger.clients.evaluation.items import TASKS, Question, read_items
from scripted_server import Reply, error_body, serve


def gold_answer(prompt: str) -> str:
    """Right for two of the five problems of GSM8K."""
    return {"Janet": "#### 18", "A robe": "It takes 3"}.get(prompt[:6].rstrip("’"), "#### 0")


def test_written_answers_are_scored_and_counted(
    eval_server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eval_server.write = gold_answer
    out = tmp_path / "r.json"
    assert evaluate(eval_server, out, "--tasks", "gsm8k", "--confidence", "0.8", "--api-key", "secret") == 0
    assert set(eval_server.keys) == {"Bearer secret"}
    assert set(eval_server.paths) == {"/v1/chat/completions"}
    asked = eval_server.requests[0]
    content = asked.pop("messages")[0]["content"]
    assert asked == {"model": "tiny", "max_tokens": 512, "temperature": 0, "confidence": 0.8}
    assert content.endswith('\n\nReason step by step, then write the final number after "####".')
    found = report(out)["tasks"]["gsm8k"]
    assert found["items"] == 5
    assert found["metrics"]["exact_match"]["a"]["value"] == pytest.approx(0.4)
    assert list(found["scores"]["a"].values()) == [{"exact_match": 1.0}] * 2 + [{"exact_match": 0.0}] * 3
    usage = found["usage"]["a"]
    assert (usage["completion_tokens"], usage["kv_slots"], usage["tokens_per_kv"], usage["cut"]) == (15, 10, 1.5, 0)
    assert usage["tokens_per_second"] == pytest.approx(15 / usage["busy_seconds"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    interval = found["metrics"]["exact_match"]["a"]
    shown = f"[{100 * interval['low']:.1f}, {100 * interval['high']:.1f}]"
    for word in (f"A: tiny at {eval_server.url}, confidence 0.8", "40.0", shown, "tokens/KV", "1.50", "95% bootstrap"):
        assert word in printed
    assert "A - B" not in printed


@pytest.mark.parametrize("has_tokenize", [True, False])
def test_choices_are_scored_by_the_echoed_log_probabilities(
    eval_server: EvalServer, has_tokenize: bool, tmp_path: Path
) -> None:
    eval_server.has_tokenize = has_tokenize
    out = tmp_path / "r.json"
    assert evaluate(eval_server, out, "--tasks", "arc_easy,piqa") == 0
    request = next(r for r in eval_server.requests if len(r["prompt"]) == (4 if has_tokenize else 5))
    assert {name: value for name, value in request.items() if name != "prompt"} == {
        "model": "tiny", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0
    }  # fmt: skip
    assert {type(prompt) for prompt in request["prompt"]} == {list if has_tokenize else str}
    rows = [json.loads(line) for line in (tmp_path / "r.answers.jsonl").read_text().splitlines()]
    by_id = {row["id"]: row["loglikelihoods"] for row in rows}
    found = report(out)["tasks"]
    assert found["piqa"]["usage"] == {}
    for name in ("arc_easy", "piqa"):
        for item in read_items(DATA, TASKS[name]):
            assert isinstance(item, Question)
            sums = [text_logprob(f" {choice}") for choice in item.choices]
            assert by_id[item.id] == pytest.approx(sums)
            norms = [s / len(choice.encode()) for s, choice in zip(sums, item.choices, strict=True)]
            expected = {"acc": sums.index(max(sums)) == item.gold, "acc_norm": norms.index(max(norms)) == item.gold}
            assert found[name]["scores"]["a"][item.id] == expected


def test_ifeval_scores_whole_prompts(eval_server: EvalServer, tmp_path: Path) -> None:
    eval_server.write = lambda prompt: "My answer is yes." if "My answer is yes" in prompt else ""
    out = tmp_path / "r.json"
    assert evaluate(eval_server, out, "--tasks", "ifeval", "--max-tokens", "40") == 0
    assert {request["max_tokens"] for request in eval_server.requests} == {40}
    scores = report(out)["tasks"]["ifeval"]["scores"]["a"]
    right = {id_ for id_, row in scores.items() if row["prompt_strict"]}
    asked = {i.id for i in read_items(DATA, TASKS["ifeval"]) if "My answer is yes" in getattr(i, "prompt", "")}
    assert right == asked
    assert 0 < len(right) < len(scores)


def test_a_second_confidence_is_compared_item_by_item(
    eval_server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = eval_server._reply

    def by_confidence(body: dict[str, Any]) -> Reply:
        eval_server.write = gold_answer if body["confidence"] == 0.5 else lambda prompt: "#### 18"
        return reply(body)

    eval_server.answer = by_confidence
    out = tmp_path / "r.json"
    options = ("--tasks", "gsm8k", "--confidence", "0.5", "--confidence-b", "1", "--limit", "4", "--concurrency", "1")
    assert evaluate(eval_server, out, *options) == 0
    assert [request["confidence"] for request in eval_server.requests] == [0.5] * 4 + [1.0] * 4
    metric = report(out)["tasks"]["gsm8k"]["metrics"]["exact_match"]
    values = [metric[name]["value"] for name in ("a", "b", "difference")]
    assert values == pytest.approx([0.5, 0.25, 0.25])
    assert metric["difference"]["low"] <= 0.25 <= metric["difference"]["high"]
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for word in ("confidence 0.5", "B: tiny at", "confidence 1", "A - B", "+25.0", "paired by item"):
        assert word in printed


def test_a_second_server_has_a_model_and_a_key_of_its_own(eval_server: EvalServer, tmp_path: Path) -> None:
    other = EvalServer(write=gold_answer, models={"data": [{"id": "base"}]})
    out = tmp_path / "r.json"
    with serve(other):
        other_side = ("--base-url-b", f"{other.url}/v1", "--api-key-b", "b")
        code = evaluate(eval_server, out, "--tasks", "gsm8k", *other_side, "--confidence", "1")
    assert code == 0
    assert {request["model"] for request in other.requests} == {"base"}
    assert {request["confidence"] for request in other.requests} == {1.0}
    assert (set(eval_server.keys), set(other.keys)) == ({None}, {"Bearer b"})
    assert report(out)["tasks"]["gsm8k"]["metrics"]["exact_match"]["difference"]["value"] == pytest.approx(-0.4)
    assert report(out)["servers"]["b"]["label"] == f"base at {other.url}, confidence 1"


def test_an_earlier_run_is_the_second_side(eval_server: EvalServer, tmp_path: Path) -> None:
    earlier, out = tmp_path / "earlier.json", tmp_path / "r.json"
    assert evaluate(eval_server, earlier, "--tasks", "gsm8k,piqa", "--limit", "4") == 0
    eval_server.write = gold_answer
    assert evaluate(eval_server, out, "--tasks", "gsm8k,piqa", "--compare", str(earlier)) == 0
    found = report(out)
    gsm8k = found["tasks"]["gsm8k"]
    assert gsm8k["items"] == 4  # those that both have
    assert gsm8k["metrics"]["exact_match"]["difference"]["value"] == pytest.approx(0.5)
    assert gsm8k["usage"]["b"] == report(earlier)["tasks"]["gsm8k"]["usage"]["a"]
    assert found["tasks"]["piqa"]["metrics"]["acc"]["difference"] == {"value": 0, "low": 0, "high": 0}
    assert found["servers"]["b"] == report(earlier)["servers"]["a"]


def test_stored_answers_are_not_asked_again(
    eval_server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "r.json", ("--tasks", "gsm8k,piqa", "--concurrency", "1")
    reply = eval_server._reply
    eval_server.answer = lambda body: (
        reply(body) if len(eval_server.requests) <= 3 else Reply(body=error_body("broken", 500), status=500)
    )
    assert evaluate(eval_server, out, *options) == 1
    error = capsys.readouterr().err
    assert "gsm8k, gsm8k_test-00003: HTTP 500: broken. Answers so far are kept: the same command goes on" in error
    answers = tmp_path / "r.answers.jsonl"
    assert len(answers.read_text().splitlines()) == 3
    answers.write_bytes(answers.read_bytes() + b'{"key": "cut o')  # as a crash would leave it
    eval_server.answer = reply
    eval_server.requests.clear()
    assert evaluate(eval_server, out, *options) == 0
    assert len(eval_server.requests) == 2 + 5
    label = f"tiny at {eval_server.url}, confidence default"
    error = capsys.readouterr().err
    assert f"gsm8k: 3 of 5 answers of {label} were in {answers} already." in error
    assert "piqa:" not in error
    first = report(out)
    eval_server.requests.clear()
    assert evaluate(eval_server, out, *options) == 0
    assert eval_server.requests == []
    assert report(out) == first
    assert evaluate(eval_server, out, *options, "--max-tokens", "9") == 0  # another question
    assert len(eval_server.requests) == 5


def test_a_full_server_is_asked_again(
    eval_server: EvalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_to_wait: list[str] = []

    def no_wait(retry_after: str, attempt: int) -> float:
        asked_to_wait.append(retry_after)
        return 0.0

    monkeypatch.setattr(connection, "_pause", no_wait)
    eval_server.full = 2
    assert evaluate(eval_server, tmp_path / "r.json", "--tasks", "gsm8k", "--limit", "1") == 0
    assert asked_to_wait == ["", ""]
    eval_server.full = 100
    monkeypatch.setattr(connection, "_LONGEST_WAIT", -1.0)
    assert evaluate(eval_server, tmp_path / "s.json", "--tasks", "gsm8k", "--limit", "1") == 1
    assert "HTTP 429: queue full" in capsys.readouterr().err
    assert len(eval_server.requests) == 3 + 1


def test_a_full_server_is_waited_for_as_long_as_it_says_or_ever_longer() -> None:
    assert connection._pause("7", 2) == 7
    for header in ("", "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "0", "3"):
        pauses = {connection._pause(header, 3) for _ in range(20)}
        assert 4 <= min(pauses) < max(pauses) <= 8
    assert connection._pause("3600", 0) == connection._pause("", 7) == connection._pause("", 10**6) == 30


def test_ctrl_c_keeps_the_answers(
    eval_server: EvalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "ask_all", interrupted)
    assert evaluate(eval_server, tmp_path / "r.json", "--tasks", "piqa") == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_usage_adds_up_and_pauses_do_not_count() -> None:
    assert busy_seconds([(0, 2), (1, 3), (10, 11), (10.2, 10.5)]) == pytest.approx(4)
    assert busy_seconds([]) == 0
    common: dict[str, Any] = {"task": "gsm8k", "id": "1", "url": "u", "model": "m", "confidence": None, "text": "x"}
    plain = Answer(key="1", **common, completion_tokens=6, sent=0, seconds=2, finish_reason="length")
    grouped = Answer(key="2", **common, completion_tokens=4, kv_slots=2, sent=1, seconds=2)
    both = Usage.of([plain, grouped])
    assert (both.completion_tokens, both.kv_slots, both.tokens_per_kv, both.cut) == (10, None, None, 1)
    assert both.tokens_per_second == pytest.approx(10 / 3)
    assert Usage.of([grouped]).tokens_per_kv == 2
    assert Usage.of([Answer(key="3", **common)]).tokens_per_second is None


def test_the_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    answer = Answer(
        key="k", task="t", id="i", url="u", model="m", confidence=0.5, text="漢\u2028\n", sent=1.5, seconds=2
    )
    with AnswerStore(path) as store:
        store.add(answer)
        assert store.get("k") == answer
    with AnswerStore(path) as store:
        assert store.get("k") == answer
        assert store.get("other") is None


def test_requests_in_flight_are_as_many_as_asked(eval_server: EvalServer, tmp_path: Path) -> None:
    flying, most = 0, 0
    post = requests.post

    async def counted(*arguments: Any) -> dict[str, Any]:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.02)
        try:
            return await post(*arguments)
        finally:
            flying -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "post", counted)
        assert evaluate(eval_server, tmp_path / "r.json", "--tasks", "gsm8k", "--concurrency", "3") == 0
    assert most == 3
