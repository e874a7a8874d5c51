"""The load generator: what fails is told by its reason, and no wrong figure comes of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench_runs import run_bench
from hamburger.clients.prompts import read_prompts
from scripted_server import Reply, ScriptedServer, error_body, hamburger_stream, plain_stream, sse

# A suite that a shell runs in the background inherits an ignored SIGINT.
BENCH = [
    sys.executable,
    "-c",
    "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from hamburger.server.cli import main\nsys.exit(main(['bench', *sys.argv[1:]]))",
]


def test_some_failures_are_counted_by_their_reason(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    good = hamburger_stream([("a", 2), ("b", 1)])
    server.replies = [
        Reply(good),
        Reply(body=error_body("The queue is full.", 429), status=429),
        Reply([good[0], sse(error_body("the engine died", 500)), b"data: [DONE]\n\n"]),
        Reply([good[0]]),
        Reply([b"data: [DONE]\n\n"]),
        Reply([b"<html>"], media_type="text/html"),
    ]
    assert run_bench(server, "--concurrency", "1", "--requests", "6", "--warm-up", "0", "--model", "m") == 0
    out = capsys.readouterr().out
    for reason in (
        "1 failed: HTTP 429: The queue is full.",
        "1 failed: error in the stream: the engine died",
        "1 failed: the stream ended before the answer did",
        "1 failed: the answer has no tokens",
        "did not answer with a stream (content-type text/html",
    ):
        assert reason in out


def test_answers_of_wrong_types_are_failures_beside_figures(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = sse({"choices": [], "usage": {"completion_tokens": "3", "prompt_tokens": "5"}})
    server.replies = [Reply(plain_stream(["a"])), Reply([plain_stream(["a"])[1], odd])]
    assert run_bench(server, "--concurrency", "1", "--requests", "2", "--warm-up", "0", "--model", "m") == 0
    assert "1 failed: the stream holds an event that makes no sense: {" in capsys.readouterr().out


def test_a_level_without_any_success_is_a_failure(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies = [Reply(body=error_body("Unknown field return_groups.", 400), status=400)]
    assert run_bench(server, "--concurrency", "2", "--requests", "3", "--warm-up", "0") == 1
    printed = capsys.readouterr()
    assert "2 in flight: 3 failed: HTTP 400: Unknown field return_groups." in printed.out
    assert "no request that succeeded" in printed.err


def test_a_failed_warm_up_ends_the_run(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies = [Reply(body=error_body("Unknown field return_groups.", 400), status=400)]
    assert run_bench(server, "--concurrency", "1") == 1
    err = capsys.readouterr().err
    assert "the warm-up request failed: HTTP 400: Unknown field return_groups." in err
    assert "--no-groups" in err
    assert len(server.requests) == 1


def test_a_server_that_falls_silent_is_a_failure_and_not_a_hang(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [Reply(hang=True)]
    options = ("--concurrency", "1", "--requests", "1", "--warm-up", "0", "--timeout", "0.3", "--model", "m")
    assert run_bench(server, *options) == 1
    assert "fell silent" in capsys.readouterr().out
    assert server.disconnected.wait(5)


def test_no_server_is_one_line_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(ScriptedServer(url="http://127.0.0.1:9")) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: cannot connect to http://127.0.0.1:9. Is the server running?")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "0"],
        ["--concurrency", "1,,2"],
        ["--confidence", "1.2"],
        ["--request-rate", "-1"],
        ["--requests", "none"],
        ["--concurrency", "1", "--request-rate", "1"],
        ["--dataset", "x", "--prompt-tokens", "3"],
        ["--endpoint", "embeddings"],
        ["--url", "localhost"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run_bench(ScriptedServer(url="http://127.0.0.1:9"), *arguments)
    assert exit_info.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_bad_files_exit_with_2_before_any_request(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert run_bench(server, "--dataset", str(dataset)) == 2
    assert "line 2" in capsys.readouterr().err
    assert run_bench(server, "--dataset", str(tmp_path / "none.jsonl")) == 2
    assert run_bench(server, "--json", str(tmp_path / "no" / "folder.json")) == 2
    assert not server.requests
    assert not server.keys
    dataset.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(dataset)


def test_the_most_frequent_reasons_are_listed(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda _: Reply(body=error_body(f"request {len(server.requests)}", 500), status=500)
    assert run_bench(server, "--concurrency", "1", "--requests", "13", "--warm-up", "0") == 1
    out = capsys.readouterr().out
    assert out.count("1 failed: HTTP 500: request") == 10
    assert "1 in flight: 3 more reasons, each as often or less" in out


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [
        (400, "return_groups: Extra inputs are not permitted", "needs --no-groups"),
        (400, "The prompt has 9000 tokens, the context 8192.", None),
        (401, "No key.", "Give the server's key"),
    ],
)
def test_a_failed_warm_up_tells_what_helps(
    status: int, message: str, remedy: str | None, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [Reply(body=error_body(message, status), status=status)]
    assert run_bench(server, "--concurrency", "1") == 1
    err = capsys.readouterr().err
    assert f"the warm-up request failed: HTTP {status}: {message}" in err
    assert ("--no-groups" in err) == (remedy == "needs --no-groups")
    assert remedy is None or remedy in err


def test_pings_alone_are_silence(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies = [Reply([b": ping\n\n"] * 200, pause=0.05)]
    assert run_bench(server, "--concurrency", "1", "--timeout", "0.3") == 1
    assert "fell silent for too long (no event, though the connection lives)" in capsys.readouterr().err


def test_an_error_in_json_with_status_200_is_told(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies = [Reply(body={"error": {"message": "out of credits"}})]
    assert run_bench(server, "--concurrency", "1") == 1
    assert "the warm-up request failed: HTTP 200: out of credits" in capsys.readouterr().err


def test_a_file_named_by_a_dash_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_bench(ScriptedServer(url="http://127.0.0.1:9"), "--json", "-")
    assert "--json: '-' names no file" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_figures_are_written_though_nobody_takes_the_tables(server: ScriptedServer, tmp_path: Path) -> None:
    server.replies = [Reply(hamburger_stream([("a", 1), ("b", 1)]))]
    figures = tmp_path / "figures.json"
    command = [*BENCH, "--url", server.url, "--concurrency", "1", "--json", str(figures)]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        assert subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, timeout=120, check=False).returncode
    assert json.loads(figures.read_text(encoding="utf-8"))["levels"][0]["ok"] == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_loads_that_are_complete_are_kept_at_an_end_from_outside(
    server: ScriptedServer, number: signal.Signals, tmp_path: Path
) -> None:
    stream, figures = hamburger_stream([("a", 1), ("b", 1)]), tmp_path / "figures.json"
    server.answer = lambda _: Reply(stream if len(server.requests) < 10 else [], hang=len(server.requests) >= 10)
    command = [*BENCH, "--url", server.url, "--concurrency", "1,2", "--json", str(figures)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(server.requests) < 10:  # the warm-up of the second load, which hangs
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "error: stopped\n"
    assert "1 in flight" in out
    assert [level["ok"] for level in json.loads(figures.read_text(encoding="utf-8"))["levels"]] == [8]
