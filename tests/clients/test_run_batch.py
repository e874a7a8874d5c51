"""`hamburger run-batch` against a real HTTP server that is scripted: what it asks, keeps, and does with what fails."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hamburger.clients import connection
from hamburger.clients.batch import command
from hamburger.clients.batch.lines import BatchRequest, read_requests
from scripted_server import Reply, ScriptedServer, error_body, serve

CHAT = "/v1/chat/completions"


def line(custom_id: str, text: str = "Hi", **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()]


def batch(server: ScriptedServer | str, requests: Path, out: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    url = server if isinstance(server, str) else server.url
    return command.run(parser.parse_args(["-i", str(requests), "-o", str(out), "--url", url, *arguments]))


def echoed(body: dict[str, Any]) -> Reply:
    """The question as the answer, of 3 tokens."""
    message = {"role": "assistant", "content": body["messages"][0]["content"]}
    return Reply(body={"choices": [{"index": 0, "message": message}], "usage": {"completion_tokens": 3}})


def test_each_request_gets_the_line_of_its_answer(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = echoed
    asked = write(tmp_path / "in.jsonl", [line(f"r{i}", f"Question {i}, ü?") for i in range(9)])
    assert batch(server, asked, tmp_path / "out.jsonl", "--concurrency", "4", "--api-key", "secret") == 0
    assert set(server.keys) == set()  # each names its model: none is looked for
    assert sorted(body["messages"][0]["content"] for body in server.requests) == [f"Question {i}, ü?" for i in range(9)]
    answers = {row["custom_id"]: row for row in rows_of(tmp_path / "out.jsonl")}
    assert sorted(answers) == [f"r{i}" for i in range(9)]
    for i in range(9):
        row = answers[f"r{i}"]
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["message"]["content"] == f"Question {i}, ü?"
    assert len({row["id"] for row in answers.values()}) == 9
    assert not (tmp_path / "out.errors.jsonl").exists()
    printed = capsys.readouterr().out
    assert f"9 answers in {tmp_path / 'out.jsonl'}." in printed
    assert "27 tokens in" in printed


def test_what_is_asked_is_what_the_line_says(server: ScriptedServer, tmp_path: Path) -> None:
    """But for --model, which is of all, and for what --priority and the server's list say of those that say nothing."""
    server.replies = [Reply(body={"choices": []})]
    no_model = line("b", body={"prompt": "Hi", "priority": 1}, url="/v1/completions")
    asked = tmp_path / "in.jsonl.gz"
    asked.write_bytes(gzip.compress(json.dumps(line("a")).encode() + b"\n\n" + json.dumps(no_model).encode()))
    assert batch(server, asked, tmp_path / "1.jsonl", "--concurrency", "1", "--api-key", "secret") == 0
    assert server.keys == ["Bearer secret"]
    assert server.paths == [CHAT, "/v1/completions"]
    assert server.requests == [line("a")["body"], {"prompt": "Hi", "priority": 1, "model": "tiny"}]
    server.requests.clear()
    options = ("--concurrency", "1", "--model", "other", "--priority", "7")
    assert batch(server, asked, tmp_path / "2.jsonl", *options) == 0
    assert server.requests == [
        {**line("a")["body"], "model": "other", "priority": 7},
        {"prompt": "Hi", "priority": 1, "model": "other"},
    ]


def test_a_second_run_asks_only_what_failed(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        return Reply(body=error_body(f"no {text}", 400), status=400) if text in bad else echoed(body)

    bad, server.answer = {"2", "3"}, answer
    asked = write(tmp_path / "in.jsonl", [line(str(i), str(i)) for i in range(5)])
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    assert batch(server, asked, out) == 1
    assert sorted(row["custom_id"] for row in rows_of(out)) == ["0", "1", "4"]
    failed = {row["custom_id"]: row["response"] for row in rows_of(errors)}
    assert sorted(failed) == ["2", "3"]
    assert failed["2"] == {"status_code": 400, "request_id": "", "body": error_body("no 2", 400)}
    printed = capsys.readouterr().out
    assert "3 answers" in printed
    assert "2 requests failed" in printed
    assert "1 x HTTP 400: no 3" in printed

    bad.remove("2")
    server.requests.clear()
    assert batch(server, asked, out, "--priority", "5") == 1
    assert sorted(body["messages"][0]["content"] for body in server.requests) == ["2", "3"]
    assert sorted(row["custom_id"] for row in rows_of(out)) == ["0", "1", "2", "4"]
    assert [row["custom_id"] for row in rows_of(errors)] == ["3"]
    assert "4 answers" in (printed := capsys.readouterr().out)
    assert "3 of them from before" in printed

    bad.clear()
    assert batch(server, asked, out) == 0
    assert len(rows_of(out)) == 5
    assert not errors.exists()
    server.requests.clear()
    assert batch(server, asked, out) == 0
    assert server.requests == []


def test_an_answer_that_was_cut_off_is_asked_again(server: ScriptedServer, tmp_path: Path) -> None:
    server.answer = echoed
    asked = write(tmp_path / "in.jsonl", [line(str(i), str(i)) for i in range(3)])
    out = tmp_path / "out.jsonl"
    assert batch(server, asked, out, "--concurrency", "1") == 0
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    server.requests.clear()
    assert batch(server, asked, out) == 0
    assert [body["messages"][0]["content"] for body in server.requests] == ["2"]
    assert [row["custom_id"] for row in rows_of(out)] == ["0", "1", "2"]


def test_answers_to_other_requests_are_not_taken_for_these(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = echoed
    asked, out = write(tmp_path / "in.jsonl", [line("a", "one"), line("b")]), tmp_path / "out.jsonl"
    assert batch(server, asked, out) == 0
    before = out.read_bytes()
    for rows, other in (([line("a", "two"), line("b")], "'a'"), ([line("b")], "'a'")):
        assert batch(server, write(asked, rows), out) == 2
        assert f"another request of custom_id {other}: name another file with --output-file" in capsys.readouterr().err
    notes = tmp_path / "notes.txt"
    notes.write_text("mine\nand no end")
    for option in ("-o", "--errors-file"):
        assert batch(server, asked, tmp_path / "new.jsonl", option, str(notes)) == 2
        assert "line 1 is no answer of this command" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert notes.read_text() == "mine\nand no end"
    assert not (tmp_path / "new.jsonl").exists()
    assert batch(server, asked, asked) == 2
    assert "--input-file and --output-file are the same file" in capsys.readouterr().err


def test_a_pipe_holds_no_answers_and_is_left_where_it_is(server: ScriptedServer, tmp_path: Path) -> None:
    """Nor does a device: `--errors-file /dev/null` must not remove it."""
    server.answer = echoed
    asked = write(tmp_path / "in.jsonl", [line(str(i), str(i)) for i in range(3)])
    out, errors = tmp_path / "out", tmp_path / "errors"
    os.mkfifo(out)
    os.mkfifo(errors)
    with ThreadPoolExecutor() as pool:
        answers, failures = pool.submit(rows_of, out), pool.submit(rows_of, errors)
        assert batch(server, asked, out, "--errors-file", str(errors)) == 0
        assert sorted(row["custom_id"] for row in answers.result()) == ["0", "1", "2"]
        assert failures.result() == []
    assert out.is_fifo()
    assert errors.is_fifo()


def test_two_runs_do_not_write_one_file(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = echoed
    asked, out = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl"
    with command._growing("--output-file", out) as first:
        first.add({"custom_id": "a"})
        assert batch(server, asked, out) == 2
        assert "out.jsonl is written by another run now" in capsys.readouterr().err
        assert rows_of(out) == [{"custom_id": "a"}]
    assert server.requests == []
    out.unlink()
    assert batch(server, asked, out) == 0


def test_what_cannot_hold_or_give_the_rows_is_named(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, pipe = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "pipe"
    os.mkfifo(pipe)
    for requests, out, message in (
        (pipe, tmp_path / "out.jsonl", "is a pipe, but it is read twice"),
        (asked, Path(), "--output-file . cannot be written"),
        (asked, tmp_path / "out.jsonl.gz", "leave .gz out"),
    ):
        assert batch(server, requests, out) == 2
        assert message in capsys.readouterr().err
    assert server.requests == []


def test_each_file_of_answers_has_errors_of_its_own(server: ScriptedServer, tmp_path: Path) -> None:
    server.replies = [Reply(body=error_body("no", 400), status=400)]
    asked = write(tmp_path / "in.jsonl", [line("a")])
    for name in ("run.1", "run.2"):
        assert batch(server, asked, tmp_path / name) == 1
    assert sorted(path.name for path in tmp_path.glob("*.errors.jsonl")) == [
        "run.1.errors.jsonl",
        "run.2.errors.jsonl",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"custom_id": None}, "custom_id is missing or no text"),
        ({"custom_id": "good"}, "custom_id 'good' is that of line 1, too"),
        ({"method": "GET"}, "method is 'GET': only POST is sent"),
        ({"url": "http://other/v1/chat/completions"}, "url is no path of the API"),
        ({"body": "Hi"}, "body is missing or no object"),
        ({"body": {"stream": True}}, "body.stream is set"),
        ({"body": {"background": True}}, "body.background is set"),
        ({"body": {"temperature": float("nan")}}, "holds NaN, Infinity"),
        ({"custom_id": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_a_wrong_line_is_told_before_anything_is_asked(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], message: str
) -> None:
    asked = write(tmp_path / "in.jsonl", [line("good"), {**line("bad"), **row}])
    assert batch(server, asked, tmp_path / "out.jsonl") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "in.jsonl, line 2" in error
    assert server.requests == []
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_hold_no_requests_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in (
        ("", "holds no requests"),
        ("{", "line 1: this is no JSON"),
        ("[]", "custom_id is missing"),
    ):
        (tmp_path / "in.jsonl").write_text(content)
        assert batch("http://127.0.0.1:1", tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 2
        assert message in capsys.readouterr().err
    assert batch("http://127.0.0.1:1", tmp_path / "none.jsonl", tmp_path / "out.jsonl") == 2
    assert "--input-file" in capsys.readouterr().err


def test_what_all_requests_would_meet_ends_the_run(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused keys, a server that stays full or is gone, and one that is none; what came before is kept."""
    monkeypatch.setattr(connection, "_LONGEST_WAIT", -1.0)
    asked = write(tmp_path / "in.jsonl", [line(str(i), str(i)) for i in range(6)])
    for i, (reply, message) in enumerate(
        (
            (Reply(body=error_body("wrong key", 401), status=401), "2: HTTP 401: wrong key. Give the server's key"),
            (Reply(body=error_body("full", 429), status=429), "2: HTTP 429: full"),
            (Reply(body=[]), f"2: {CHAT} did not answer with a JSON object"),
        )
    ):
        server.requests.clear()
        server.answer = lambda body, reply=reply: reply if body["messages"][0]["content"] == "2" else echoed(body)
        out = tmp_path / f"{i}.jsonl"
        assert batch(server, asked, out, "--concurrency", "1") == 1
        assert len(server.requests) == 3
        assert [row["custom_id"] for row in rows_of(out)] == ["0", "1"]
        error = capsys.readouterr().err
        assert message in error
        assert "the same command goes on from there" in error
    assert batch("http://127.0.0.1:1", asked, tmp_path / "0.jsonl") == 1
    assert "cannot connect" in capsys.readouterr().err
    assert [row["custom_id"] for row in rows_of(tmp_path / "0.jsonl")] == ["0", "1"]


def test_a_full_server_is_asked_again(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_pause", lambda retry_after, attempt: 0.0)
    full = Reply(body=error_body("queue full", 429), status=429)
    server.replies = [full, full, Reply(body={"choices": []})]
    assert batch(server, write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl") == 0
    assert len(server.requests) == 3


@pytest.mark.parametrize("loss", [Reply(breaks=True), Reply(chunks=[b'{"choices"'], breaks=True), Reply(hang=True)])
def test_a_connection_that_ends_or_falls_silent_is_no_end_of_the_run(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Reply
) -> None:
    """Also of the first request, where the server lists its models."""
    monkeypatch.setattr(connection, "_pause", lambda retry_after, attempt: 0.0)
    lost: set[str] = set()

    def answer(body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        if text in "03" and text not in lost:
            lost.add(text)
            return loss
        return echoed(body)

    server.answer = answer
    asked, out = write(tmp_path / "in.jsonl", [line(str(i), str(i)) for i in range(5)]), tmp_path / "out.jsonl"
    assert batch(server, asked, out, "--concurrency", "1", "--timeout", "3") == 0
    assert [row["custom_id"] for row in rows_of(out)] == ["0", "1", "2", "3", "4"]
    assert lost == {"0", "3"}


def test_a_request_whose_answer_never_comes_is_told_and_the_others_go_on(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "_pause", lambda retry_after, attempt: 0.0)
    monkeypatch.setattr(connection, "_LONGEST_WAIT", -1.0)
    bad = {"1", "3"}
    server.answer = lambda body: Reply(breaks=True) if body["messages"][0]["content"] in bad else echoed(body)
    asked, out = write(tmp_path / "in.jsonl", [line(str(i), str(i)) for i in range(5)]), tmp_path / "out.jsonl"
    assert batch(server, asked, out, "--concurrency", "1") == 1
    assert [row["custom_id"] for row in rows_of(out)] == ["0", "2", "4"]
    failed = {row["custom_id"]: row for row in rows_of(tmp_path / "out.errors.jsonl")}
    assert sorted(failed) == ["1", "3"]
    assert failed["1"]["response"] is None
    assert failed["1"]["error"]["code"] == "connection_lost"
    assert "2 x the connection to" in capsys.readouterr().out
    bad.clear()
    assert batch(server, asked, out) == 0  # which reads the file of errors
    assert len(rows_of(out)) == 5


def test_a_server_that_answers_nobody_any_more_ends_the_run(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "_pause", lambda retry_after, attempt: 0.0)
    monkeypatch.setattr(connection, "_LONGEST_WAIT", -1.0)
    server.answer = lambda body: echoed(body) if body["messages"][0]["content"] == "0" else Reply(breaks=True)
    asked, out = write(tmp_path / "in.jsonl", [line(str(i), str(i)) for i in range(9)]), tmp_path / "out.jsonl"
    assert batch(server, asked, out, "--concurrency", "1") == 1
    assert len(server.requests) == 1 + 3 * 2
    assert "3: the connection to" in capsys.readouterr().err
    assert [row["custom_id"] for row in rows_of(tmp_path / "out.errors.jsonl")] == ["1", "2"]


@pytest.mark.parametrize("first_lost", ["1", "0"])
def test_a_server_that_starts_again_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_lost: str
) -> None:
    """What is in flight breaks off, and until it listens again nobody can connect. It is known from its answers, also
    from that to which model it serves."""
    rows = [line(str(i), str(i)) for i in range(3)]
    if first_lost == "0":
        del rows[2]["body"]["model"]
    asked, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    pauses: list[int] = []
    stopping = threading.Event()

    def ending(body: dict[str, Any]) -> Reply:
        if body["messages"][0]["content"] != first_lost:
            return echoed(body)
        stopping.set()
        return Reply(hang=True)

    with ExitStack() as first_life, ExitStack() as second_life, ThreadPoolExecutor() as pool:
        first = first_life.enter_context(serve(ScriptedServer(answer=ending)))
        port = int(first.url.rpartition(":")[2])

        def pause(retry_after: str, attempt: int) -> float:
            pauses.append(attempt)
            if attempt == 2:
                second_life.enter_context(serve(ScriptedServer(answer=echoed), port))
            return 0.0

        def stop() -> None:
            stopping.wait(60)
            first_life.close()

        monkeypatch.setattr(connection, "_pause", pause)
        stopped = pool.submit(stop)
        assert batch(first.url, asked, out, "--concurrency", "1") == 0
        stopped.result()
    assert pauses == [0, 1, 2]
    assert [row["custom_id"] for row in rows_of(out)] == ["0", "1", "2"]


def test_bodies_are_read_as_they_are_sent(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a large file are never in memory together."""
    ahead: list[int] = []

    def watched(*args: Any) -> Iterator[BatchRequest]:
        for number, request in enumerate(read_requests(*args), start=1):
            if server.requests:
                ahead.append(number - len(server.requests))
            yield request

    monkeypatch.setattr(command, "read_requests", watched)
    server.answer = echoed
    asked = write(tmp_path / "in.jsonl", [line(str(i), str(i)) for i in range(50)])
    assert batch(server, asked, tmp_path / "out.jsonl", "--concurrency", "2") == 0
    assert len(ahead) > 40
    assert max(ahead) <= 2


def test_errors_that_gateways_call_a_success_are_failures(server: ScriptedServer, tmp_path: Path) -> None:
    server.replies = [Reply(body=error_body("upstream", 500))]
    out = tmp_path / "out.jsonl"
    assert batch(server, write(tmp_path / "in.jsonl", [line("a")]), out) == 1
    assert not out.exists()
    assert len(rows_of(tmp_path / "out.errors.jsonl")) == 1


def test_a_failure_that_is_no_json_is_kept_as_text(tmp_path: Path) -> None:
    with serve(ScriptedServer(replies=[Reply(chunks=[b"<html>gone"], status=410, media_type="text/html")])) as server:
        assert batch(server, write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl") == 1
    assert rows_of(tmp_path / "out.errors.jsonl")[0]["response"]["body"] == {"error": {"message": "<html>gone"}}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_from_outside_keeps_the_answers(server: ScriptedServer, number: signal.Signals, tmp_path: Path) -> None:
    asked, out = write(tmp_path / "in.jsonl", [line("0", "0"), line("1", "1")]), tmp_path / "out.jsonl"
    server.answer = lambda body: Reply(hang=True) if body["messages"][0]["content"] == "1" else echoed(body)
    run = (  # a suite that a shell runs in the background inherits an ignored SIGINT
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from hamburger.server.cli import main\nsys.exit(main(['run-batch', *sys.argv[1:]]))"
    )
    files = ["-i", str(asked), "-o", str(out), "--concurrency", "1"]
    command_line = [sys.executable, "-c", run, "--url", server.url, *files]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(server.requests) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; the same command goes on from there" in err
    assert [row["custom_id"] for row in rows_of(out)] == ["0"]
    assert not (tmp_path / "out.errors.jsonl").exists()
