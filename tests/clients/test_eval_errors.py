"""`hamburger eval-tasks`: answers, options and scores that make no sense are named, and never scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval_server import DATA, EvalServer, evaluate, report
from hamburger.clients.connection import Clients
from hamburger.clients.evaluation import requests
from hamburger.clients.evaluation.answers import AnswerStore
from hamburger.clients.evaluation.items import TASKS, read_items
from hamburger.clients.wire import RequestError
from scripted_server import Reply, error_body


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
    eval_server: EvalServer,
    has_tokenize: bool,
    spoil: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eval_server.has_tokenize = has_tokenize
    echo = EvalServer.echo
    monkeypatch.setattr(EvalServer, "echo", lambda self, index, prompt: spoil(echo(self, index, prompt)))
    assert evaluate(eval_server, tmp_path / "r.json", "--tasks", "piqa", "--limit", "1") == 1
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
    eval_server: EvalServer, body: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eval_server.answer = lambda asked: Reply(body=body)
    assert evaluate(eval_server, tmp_path / "r.json", "--tasks", "gsm8k", "--concurrency", "2") == 1
    assert message in capsys.readouterr().err
    eval_server.answer = lambda asked: Reply([b"no JSON"])
    assert evaluate(eval_server, tmp_path / "r.json", "--tasks", "gsm8k") == 1
    assert "did not answer with a JSON object. Is it" in capsys.readouterr().err


async def test_a_tokenize_that_only_counts_is_no_better_than_none_and_a_refusal_an_error(
    eval_server: EvalServer,
) -> None:
    asked = requests.Server(eval_server.url, "tiny", None)
    answers = {
        200: httpx.Response(200, json={"count": 3}),
        401: httpx.Response(401, json=error_body("no key", 401)),
    }
    status = 200
    transport = httpx.MockTransport(lambda request: answers[status])
    async with httpx.AsyncClient(transport=transport, base_url=eval_server.url) as client:
        assert await requests._has_tokenize(client, asked) is False
        status = 401
        with pytest.raises(RequestError, match="HTTP 401: no key"):
            await requests._has_tokenize(client, asked)


async def test_a_connection_that_breaks_is_one_line(tmp_path: Path) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("gone")

    asked, items = requests.Server("http://s", "tiny", None), read_items(DATA, TASKS["gsm8k"])
    async with Clients({"transport": httpx.MockTransport(broken), "base_url": "http://s"}) as clients:
        message = r"gsm8k, gsm8k_test-0000\d: the connection to http://s failed"
        with AnswerStore(tmp_path / "a.jsonl") as store, pytest.raises(RequestError, match=message):
            await requests.ask_all(clients, asked, TASKS["gsm8k"], items, 9, store, 2, lambda: None)


def test_wrong_options_are_named_before_anything_is_asked(
    eval_server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    (tmp_path / "bad.answers.jsonl").write_text("{}\n")
    piqa = tmp_path / "piqa.json"
    assert evaluate(eval_server, piqa, "--tasks", "piqa") == 0
    eval_server.requests.clear()
    for options, message in (
        (("--data", str(tmp_path / "none")), "is no folder: name the one with"),
        (("--data", str(tmp_path)), "holds no ifeval.jsonl.gz: put it there, or leave ifeval out"),
        (("--compare", str(bad), "--confidence-b", "1"), "are both given: choose one"),
        (("--compare", str(bad)), "holds no results: name a file that hamburger eval-tasks wrote"),
        (("--compare", str(piqa)), "has no arc_easy, gsm8k, ifeval: leave them out of --tasks"),
        (("--compare", str(tmp_path / "absent")), "absent cannot be read (No such file or directory): name a file"),
        (("--compare", str(tmp_path)), f"error: --compare {tmp_path} cannot be read (Is a directory): name a file"),
        (("--answers", str(tmp_path)), f"error: --answers {tmp_path} cannot be written (Is a directory): name a file"),
        (("--answers", str(tmp_path / "none" / "a")), "none/a cannot be written (No such file or directory): name"),
        (("--answers", str(tmp_path / "bad.answers.jsonl")), "line 1 is no answer: delete that line"),
        (("--out", str(tmp_path / "none" / "r.json")), "No such file"),
        (("--base-url-b", eval_server.url), "A and B are the same: change --base-url-b"),
    ):
        assert evaluate(eval_server, out, *options) == 2
        assert message in capsys.readouterr().err
    assert eval_server.requests == []
    with pytest.raises(SystemExit):
        evaluate(eval_server, out, "--tasks", "piqa,mmlu")
    assert "'mmlu' is no task: choose of ifeval, gsm8k, arc_easy, piqa" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--answers", ""), "--answers: '' names no file: write its path"),
        (("--data", ""), "--data: '' names no file"),
        (("--resamples", str(10**12)), "--resamples: '1000000000000' is not a whole number from 1 to 1000000\n"),
        (("--concurrency", "99999999"), "--concurrency: '99999999' is not a whole number from 1 to 10000\n"),
    ],
)
def test_options_out_of_range_are_named(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        evaluate(EvalServer(url="http://127.0.0.1:1"), tmp_path / "r.json", *arguments)
    assert exit_info.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


def test_a_limit_beyond_all_files_takes_every_item() -> None:
    assert read_items(DATA, TASKS["piqa"], 10**20) == read_items(DATA, TASKS["piqa"])


def test_no_option_replaces_the_file_of_another(
    eval_server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, answers, link = tmp_path / "earlier.json", tmp_path / "earlier.answers.jsonl", tmp_path / "link"
    assert evaluate(eval_server, earlier, "--tasks", "piqa") == 0
    link.symlink_to(answers)
    kept = earlier.read_bytes(), answers.read_bytes()
    eval_server.requests.clear()
    for out, options, message in (
        (answers, ("--answers", str(answers)), f"--out and --answers are the same file, {answers}: name another one."),
        (link, ("--answers", str(answers)), f"--out and --answers are the same file, {link}: name"),
        (earlier, ("--compare", str(earlier)), f"--out and --compare are the same file, {earlier}: name"),
        (tmp_path / "r.json", ("--answers", str(earlier), "--compare", str(earlier)), "--answers and --compare are"),
    ):
        assert evaluate(eval_server, out, "--tasks", "piqa", *options) == 2
        assert message in capsys.readouterr().err
    assert (earlier.read_bytes(), answers.read_bytes()) == kept
    assert not eval_server.requests
    assert sorted(tmp_path.iterdir()) == sorted([earlier, answers, link])


async def test_odd_texts_are_kept_and_odd_counts_are_an_error(tmp_path: Path) -> None:
    asked, items = requests.Server("http://s", "tiny", None), read_items(DATA, TASKS["gsm8k"], 1)
    body = b'{"choices": [{"message": {"content": "a\\ud83d"}}], "usage": {"completion_tokens": COUNT}}'

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=body.replace(b"COUNT", count))

    async with Clients({"transport": httpx.MockTransport(answer), "base_url": "http://s"}) as clients:
        with AnswerStore(tmp_path / "a.jsonl") as store:
            count = b'"3"'
            with pytest.raises(RequestError, match="usage holds a count that is no whole number"):
                await requests.ask_all(clients, asked, TASKS["gsm8k"], items, 9, store, 1, lambda: None)
            count = b"3"
            [kept] = await requests.ask_all(clients, asked, TASKS["gsm8k"], items, 9, store, 1, lambda: None)
    assert (kept.text, kept.completion_tokens) == ("a?", 3)


def test_scores_that_cannot_be_compared_are_named(
    eval_server: EvalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, out = tmp_path / "earlier.json", tmp_path / "r.json"
    assert evaluate(eval_server, earlier, "--tasks", "piqa") == 0
    for change, message in (
        ({"x": {"acc": 1, "acc_norm": 1}}, "piqa: the two sides share no item id"),
        ({"x": {"acc": 1}}, "holds no scores of each item of piqa"),
    ):
        old = report(earlier)
        old["tasks"]["piqa"]["scores"]["a"] = change
        earlier.write_text(json.dumps(old))
        assert evaluate(eval_server, out, "--tasks", "piqa", "--compare", str(earlier)) == 2
        assert message in capsys.readouterr().err


def test_no_server_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(EvalServer(url="http://127.0.0.1:1"), tmp_path / "r.json", "--tasks", "piqa") == 1
    assert "cannot connect to http://127.0.0.1:1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
