"""`hamburger eval-tasks` against a real HTTP server that is scripted: what it asks, keeps, scores and reports."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval_server import EvalServer, text_logprob
from hamburger.clients import eval_requests, eval_tasks
from hamburger.clients.eval_answers import Answer, AnswerStore, Usage, busy_seconds
from hamburger.clients.eval_items import TASKS, Question, read_items
from hamburger.clients.wire import RequestError
from scripted_server import Reply, error_body, serve

DATA = Path(__file__).parents[1] / "data" / "eval"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EvalServer]:
    monkeypatch.delenv("HAMBURGER_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    running = EvalServer()
    with serve(running):
        yield running


def evaluate(server: EvalServer, out: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    eval_tasks.add_arguments(parser)
    options = ["--base-url", server.url, "--data", str(DATA), "--out", str(out), "--resamples", "50", *arguments]
    return eval_tasks.run(parser.parse_args(options))


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def gold_answer(prompt: str) -> str:
    """Right for two of the five problems of GSM8K."""
    return {"Janet": "#### 18", "A robe": "It takes 3"}.get(prompt[:6].rstrip("’"), "#### 0")


def test_written_answers_are_scored_and_counted(
    server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.write = gold_answer
    out = tmp_path / "r.json"
    assert evaluate(server, out, "--tasks", "gsm8k", "--confidence", "0.8", "--api-key", "secret") == 0
    assert set(server.keys) == {"Bearer secret"}
    assert set(server.paths) == {"/v1/chat/completions"}
    asked = server.requests[0]
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
    for word in (f"A: tiny at {server.url}, confidence 0.8", "40.0", shown, "tokens/KV", "1.50", "95% bootstrap"):
        assert word in printed
    assert "A - B" not in printed


@pytest.mark.parametrize("has_tokenize", [True, False])
def test_choices_are_scored_by_the_echoed_log_probabilities(
    server: EvalServer, has_tokenize: bool, tmp_path: Path
) -> None:
    server.has_tokenize = has_tokenize
    out = tmp_path / "r.json"
    assert evaluate(server, out, "--tasks", "arc_easy,piqa") == 0
    request = next(r for r in server.requests if len(r["prompt"]) == (4 if has_tokenize else 5))
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


def test_ifeval_scores_whole_prompts(server: EvalServer, tmp_path: Path) -> None:
    server.write = lambda prompt: "My answer is yes." if "My answer is yes" in prompt else ""
    out = tmp_path / "r.json"
    assert evaluate(server, out, "--tasks", "ifeval", "--max-tokens", "40") == 0
    assert {request["max_tokens"] for request in server.requests} == {40}
    scores = report(out)["tasks"]["ifeval"]["scores"]["a"]
    right = {id_ for id_, row in scores.items() if row["prompt_strict"]}
    asked = {i.id for i in read_items(DATA, TASKS["ifeval"]) if "My answer is yes" in getattr(i, "prompt", "")}
    assert right == asked
    assert 0 < len(right) < len(scores)


def test_a_second_confidence_is_compared_item_by_item(
    server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = server._reply

    def by_confidence(body: dict[str, Any]) -> Reply:
        server.write = gold_answer if body["confidence"] == 0.5 else lambda prompt: "#### 18"
        return reply(body)

    server.answer = by_confidence
    out = tmp_path / "r.json"
    options = ("--tasks", "gsm8k", "--confidence", "0.5", "--confidence-b", "1", "--limit", "4", "--concurrency", "1")
    assert evaluate(server, out, *options) == 0
    assert [request["confidence"] for request in server.requests] == [0.5] * 4 + [1.0] * 4
    metric = report(out)["tasks"]["gsm8k"]["metrics"]["exact_match"]
    values = [metric[name]["value"] for name in ("a", "b", "difference")]
    assert values == pytest.approx([0.5, 0.25, 0.25])
    assert metric["difference"]["low"] <= 0.25 <= metric["difference"]["high"]
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for word in ("confidence 0.5", "B: tiny at", "confidence 1", "A - B", "+25.0", "paired by item"):
        assert word in printed


def test_a_second_server_has_a_model_and_a_key_of_its_own(server: EvalServer, tmp_path: Path) -> None:
    other = EvalServer(write=gold_answer, models={"data": [{"id": "base"}]})
    out = tmp_path / "r.json"
    with serve(other):
        code = evaluate(
            server, out, "--tasks", "gsm8k", "--base-url-b", f"{other.url}/v1", "--api-key-b", "b", "--confidence", "1"
        )
    assert code == 0
    assert {request["model"] for request in other.requests} == {"base"}
    assert {request["confidence"] for request in other.requests} == {1.0}
    assert (set(server.keys), set(other.keys)) == ({None}, {"Bearer b"})
    assert report(out)["tasks"]["gsm8k"]["metrics"]["exact_match"]["difference"]["value"] == pytest.approx(-0.4)
    assert report(out)["servers"]["b"]["label"] == f"base at {other.url}, confidence 1"


def test_an_earlier_run_is_the_second_side(server: EvalServer, tmp_path: Path) -> None:
    earlier, out = tmp_path / "earlier.json", tmp_path / "r.json"
    assert evaluate(server, earlier, "--tasks", "gsm8k,piqa", "--limit", "4") == 0
    server.write = gold_answer
    assert evaluate(server, out, "--tasks", "gsm8k,piqa", "--compare", str(earlier)) == 0
    found = report(out)
    gsm8k = found["tasks"]["gsm8k"]
    assert gsm8k["items"] == 4  # those that both have
    assert gsm8k["metrics"]["exact_match"]["difference"]["value"] == pytest.approx(0.5)
    assert gsm8k["usage"]["b"] == report(earlier)["tasks"]["gsm8k"]["usage"]["a"]
    assert found["tasks"]["piqa"]["metrics"]["acc"]["difference"] == {"value": 0, "low": 0, "high": 0}
    assert found["servers"]["b"] == report(earlier)["servers"]["a"]


def test_stored_answers_are_not_asked_again(
    server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "r.json", ("--tasks", "gsm8k,piqa", "--concurrency", "1")
    reply = server._reply
    server.answer = lambda body: (
        reply(body) if len(server.requests) <= 3 else Reply(body=error_body("broken", 500), status=500)
    )
    assert evaluate(server, out, *options) == 1
    error = capsys.readouterr().err
    assert "gsm8k, gsm8k_test-00003: HTTP 500: broken. Answers so far are kept: the same command goes on" in error
    answers = tmp_path / "r.answers.jsonl"
    assert len(answers.read_text().splitlines()) == 3
    answers.write_bytes(answers.read_bytes() + b'{"key": "cut o')  # as a crash would leave it
    server.answer = reply
    server.requests.clear()
    assert evaluate(server, out, *options) == 0
    assert len(server.requests) == 2 + 5
    first = report(out)
    server.requests.clear()
    assert evaluate(server, out, *options) == 0
    assert server.requests == []
    assert report(out) == first
    assert evaluate(server, out, *options, "--max-tokens", "9") == 0  # another question
    assert len(server.requests) == 5


def test_a_full_server_is_asked_again(
    server: EvalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_to_wait: list[str] = []

    def no_wait(retry_after: str, attempt: int) -> float:
        asked_to_wait.append(retry_after)
        return 0.0

    monkeypatch.setattr(eval_requests, "_wait", no_wait)
    server.full = 2
    assert evaluate(server, tmp_path / "r.json", "--tasks", "gsm8k", "--limit", "1") == 0
    assert asked_to_wait == ["", ""]
    server.full = 100
    assert evaluate(server, tmp_path / "s.json", "--tasks", "gsm8k", "--limit", "1") == 1
    assert "HTTP 429: queue full" in capsys.readouterr().err
    assert len(server.requests) == 3 + 8


def test_a_full_server_is_waited_for_as_long_as_it_says_or_ever_longer() -> None:
    assert eval_requests._wait("7", 5) == 7
    assert [eval_requests._wait(header, 3) for header in ("", "Wed, 21 Oct 2026 07:28:00 GMT", "-1")] == [8, 8, 8]
    assert eval_requests._wait("3600", 0) == eval_requests._wait("", 7) == 30


def without_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "logprobs": None}


def changed(choice: dict[str, Any], logprobs: list[float | None]) -> dict[str, Any]:
    return {**choice, "logprobs": {"token_logprobs": logprobs}}


@pytest.mark.parametrize(
    ("has_tokenize", "spoil", "message"),
    [
        (True, without_logprobs, "arc_easy and piqa need a server that supports echo"),
        (True, lambda c: changed(c, c["logprobs"]["token_logprobs"][1:]), "did not echo each prompt whole"),
        (True, lambda c: changed(c, [None, *c["logprobs"]["token_logprobs"]]), "another number of token_logprobs"),
        (True, lambda c: changed(c, [*c["logprobs"]["token_logprobs"][:-2], None, 0.0]), "no finite log-probability"),
        (False, lambda c: changed(c, [None, 0.0]), "no finite log-probability for every token"),
    ],
)
def test_a_wrong_echo_is_an_error_and_never_a_score(
    server: EvalServer,
    has_tokenize: bool,
    spoil: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.has_tokenize = has_tokenize
    echo = EvalServer.echo
    monkeypatch.setattr(EvalServer, "echo", lambda self, index, prompt: spoil(echo(self, index, prompt)))
    assert evaluate(server, tmp_path / "r.json", "--tasks", "piqa", "--limit", "1") == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"choices": []}, "without choices[0].message.content"),
        ({"choices": [{"message": {"content": ["text"]}}]}, "without choices[0].message.content"),
        ([], "did not answer with a JSON object"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(
    server: EvalServer, body: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda asked: Reply(body=body)
    assert evaluate(server, tmp_path / "r.json", "--tasks", "gsm8k", "--concurrency", "2") == 1
    assert message in capsys.readouterr().err
    server.answer = lambda asked: Reply([b"no JSON"])
    assert evaluate(server, tmp_path / "r.json", "--tasks", "gsm8k") == 1
    assert "did not answer with a JSON object. Is it" in capsys.readouterr().err


async def test_a_tokenize_that_only_counts_is_as_good_as_none_and_a_refusal_is_an_error(server: EvalServer) -> None:
    asked = eval_requests.Server(server.url, "tiny", None)
    answers = {
        200: httpx.Response(200, json={"count": 3}),
        401: httpx.Response(401, json=error_body("no key", 401)),
    }
    status = 200
    transport = httpx.MockTransport(lambda request: answers[status])
    async with httpx.AsyncClient(transport=transport, base_url=server.url) as client:
        assert await eval_requests._has_tokenize(client, asked) is False
        status = 401
        with pytest.raises(RequestError, match="HTTP 401: no key"):
            await eval_requests._has_tokenize(client, asked)


async def test_a_connection_that_breaks_is_one_line(tmp_path: Path) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("gone")

    asked, items = eval_requests.Server("http://s", "tiny", None), read_items(DATA, TASKS["gsm8k"])
    async with httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url="http://s") as client:
        message = r"gsm8k, gsm8k_test-0000\d: the connection to http://s failed"
        with AnswerStore(tmp_path / "a.jsonl") as store, pytest.raises(RequestError, match=message):
            await eval_requests.ask_all(client, asked, TASKS["gsm8k"], items, 9, store, 2, lambda: None)


def test_wrong_options_are_named_before_anything_is_asked(
    server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    (tmp_path / "bad.answers.jsonl").write_text("{}\n")
    piqa = tmp_path / "piqa.json"
    assert evaluate(server, piqa, "--tasks", "piqa") == 0
    server.requests.clear()
    for options, message in (
        (("--data", str(tmp_path / "none")), "is no folder: name the one with"),
        (("--data", str(tmp_path)), "holds no ifeval.jsonl.gz: put it there, or leave ifeval out"),
        (("--compare", str(bad), "--confidence-b", "1"), "are both given: choose one"),
        (("--compare", str(bad)), "holds no results: name a file that hamburger eval-tasks wrote"),
        (("--compare", str(piqa)), "has no arc_easy, gsm8k, ifeval: leave them out of --tasks"),
        (("--compare", str(tmp_path / "absent")), "No such file"),
        (("--answers", str(tmp_path / "bad.answers.jsonl")), "line 1 is no answer: delete that line"),
        (("--out", str(tmp_path / "none" / "r.json")), "No such file"),
        (("--base-url-b", server.url), "A and B are the same: change --base-url-b"),
    ):
        assert evaluate(server, out, *options) == 2
        assert message in capsys.readouterr().err
    assert server.requests == []
    with pytest.raises(SystemExit):
        evaluate(server, out, "--tasks", "piqa,mmlu")
    assert "'mmlu' is no task: choose of ifeval, gsm8k, arc_easy, piqa" in capsys.readouterr().err


def test_scores_that_cannot_be_compared_are_named(
    server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, out = tmp_path / "earlier.json", tmp_path / "r.json"
    assert evaluate(server, earlier, "--tasks", "piqa") == 0
    for change, message in (
        ({"x": {"acc": 1, "acc_norm": 1}}, "piqa: the two sides share no item id"),
        ({"x": {"acc": 1}}, "holds no scores of each item of piqa"),
    ):
        old = report(earlier)
        old["tasks"]["piqa"]["scores"]["a"] = change
        earlier.write_text(json.dumps(old))
        assert evaluate(server, out, "--tasks", "piqa", "--compare", str(earlier)) == 2
        assert message in capsys.readouterr().err


def test_no_server_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(EvalServer(url="http://127.0.0.1:1"), tmp_path / "r.json", "--tasks", "piqa") == 1
    assert "cannot connect to http://127.0.0.1:1" in capsys.readouterr().err


def test_ctrl_c_keeps_the_answers(
    server: EvalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_tasks, "ask_all", interrupted)
    assert evaluate(server, tmp_path / "r.json", "--tasks", "piqa") == 130
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


def test_requests_in_flight_are_as_many_as_asked(server: EvalServer, tmp_path: Path) -> None:
    flying, most = 0, 0
    post = eval_requests.post

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
        patch.setattr(eval_requests, "post", counted)
        assert evaluate(server, tmp_path / "r.json", "--tasks", "gsm8k", "--concurrency", "3") == 0
    assert most == 3
