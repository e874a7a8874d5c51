"""The terminal chat against a real HTTP server: what it sends, what Ctrl-C does, what it says of what goes wrong."""

from __future__ import annotations

import io
import signal
import subprocess
import sys

import pytest

from chat_terminal import Captured, run_chat, say, type_lines
from hamburger.clients.chat.answer import Painter
from hamburger.clients.wire import StreamDecoder, StreamEvent
from scripted_server import Reply, ScriptedServer, error_body, hamburger_stream, plain_stream, sse


def test_a_pipe_gets_answers_on_stdout_and_figures_on_stderr(
    server: ScriptedServer, pipe: io.StringIO, capsys: Captured
) -> None:
    server.replies = [
        Reply(hamburger_stream([("Gr\u00fc\u00dfe, ", 3), ("[bold]\U0001f354", 2)])),
        Reply(hamburger_stream([("zwei\n", 1)], finish="length")),
    ]
    say(pipe, "eins?", "", "  zwei?")
    options = ("--system", "Be brief.", "--confidence", "0.7", "--temperature", "0", "--max-tokens", "9")
    assert run_chat(server, *options) == 0
    printed = capsys.readouterr()
    assert printed.out == "Gr\u00fc\u00dfe, [bold]\U0001f354\nzwei\n"
    first, second = printed.err.splitlines()
    assert first.startswith("5 tokens · 2 KV slots · 2.50 tokens per KV · ")
    assert "first token after" in first
    assert second.startswith("1 token · 1 KV slot · 1.00 tokens per KV · first token after")
    assert second.endswith("cut at the token limit")
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "eins?"},
        {"role": "assistant", "content": "Gr\u00fc\u00dfe, [bold]\U0001f354"},
        {"role": "user", "content": "zwei?"},
    ]
    assert server.requests[1] == {
        "model": "tiny",
        "messages": history,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_groups": True,
        "confidence": 0.7,
        "temperature": 0.0,
        "max_tokens": 9,
    }


def test_without_options_no_field_is_sent_that_only_hamburger_knows(server: ScriptedServer, pipe: io.StringIO) -> None:
    server.replies = [Reply(plain_stream(["a"]))]
    say(pipe, "one")
    assert run_chat(server, "--no-colour-groups", "--model", "other", "--api-key", "k") == 0
    assert set(server.requests[0]) == {"model", "messages", "stream", "stream_options"}
    assert server.requests[0]["model"] == "other"


def test_a_plain_server_gives_the_figures_that_can_be_known(
    server: ScriptedServer, pipe: io.StringIO, capsys: Captured
) -> None:
    server.replies = [Reply(plain_stream(["a", "b"]))]
    say(pipe, "one")
    assert run_chat(server) == 0
    printed = capsys.readouterr()
    assert printed.out == "ab\n"
    assert printed.err.startswith("2 tokens · ")
    assert "KV" not in printed.err


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Ctrl-C comes when the first group was shown: the connection closes, what was said stays in the conversation."""
    server.replies = [Reply(hamburger_stream([("begun", 2), (" never", 1)])[:1], hang=True), Reply(plain_stream(["b"]))]
    shown = Painter.show

    def show(painter: Painter, event: StreamEvent) -> None:
        shown(painter, event)
        if painter.text == "begun":
            raise KeyboardInterrupt

    monkeypatch.setattr(Painter, "show", show)
    type_lines(monkeypatch, "one", "two")
    assert run_chat(server) == 0
    assert server.disconnected.wait(5)
    printed = capsys.readouterr()
    assert printed.out == "begun\nb\n"
    assert "2 tokens · 1 KV slot · 2.00 tokens per KV · first token after" in printed.err
    assert "stopped" in printed.err
    assert [m["content"] for m in server.requests[1]["messages"]] == ["one", "begun", "two"]


def test_ctrl_c_before_the_first_token_takes_the_question_back(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = [Reply(hamburger_stream([("a", 1)]))]
    feed = StreamDecoder.feed
    pressed = False

    def press(decoder: StreamDecoder, chunk: bytes) -> list[StreamEvent]:
        nonlocal pressed
        if not pressed:
            pressed = True
            raise KeyboardInterrupt
        return feed(decoder, chunk)

    monkeypatch.setattr(StreamDecoder, "feed", press)
    type_lines(monkeypatch, "one", "two")
    assert run_chat(server) == 0
    assert [m["content"] for m in server.requests[1]["messages"]] == ["two"]


def test_a_real_ctrl_c_ends_piped_input(server: ScriptedServer) -> None:
    server.replies = [Reply(hamburger_stream([("begun", 2), ("", 1)])[:1], hang=True)]
    # A suite that a shell runs in the background inherits an ignored SIGINT.
    program = (
        "import argparse, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from hamburger.clients.chat import command\nparser = argparse.ArgumentParser()\n"
        "command.add_arguments(parser)\nsys.exit(command.run(parser.parse_args()))"
    )
    command, pipe = [sys.executable, "-c", program, "--url", server.url], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.read(5) == b"begun"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"stopped" in err
    assert b"Traceback" not in err
    assert server.disconnected.wait(5)


def test_an_error_is_one_line_and_takes_the_question_back(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.replies = [
        Reply(body=error_body("The prompt has 9000 tokens, the context 8192.", 400, "messages"), status=400),
        Reply([hamburger_stream([("half", 1), ("", 1)])[0], sse(error_body("the engine died", 500))]),
        Reply(hamburger_stream([("fine", 1)])),
    ]
    type_lines(monkeypatch, "one", "two", "three")
    assert run_chat(server) == 0
    printed = capsys.readouterr()
    assert printed.out == "half\nfine\n"
    assert "error: HTTP 400: The prompt has 9000 tokens, the context 8192.\n" in printed.err
    assert "/clear" in printed.err
    assert "error: error in the stream: the engine died\n" in printed.err
    assert [m["content"] for m in server.requests[2]["messages"]] == ["three"]


def test_piped_input_ends_at_the_first_error(server: ScriptedServer, pipe: io.StringIO, capsys: Captured) -> None:
    server.replies = [Reply(body=error_body("Wrong key.", 401), status=401)]
    say(pipe, "one", "two")
    assert run_chat(server) == 1
    assert len(server.requests) == 1
    assert "HTTP 401: Wrong key. Give the server's key with --api-key" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of Python's UTF-8 mode, and of the C locale
def test_piped_input_that_is_no_text_says_so(
    errors: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9?\n"), encoding="utf-8", errors=errors))
    with pytest.raises(ValueError, match=r"^standard input is no UTF-8 text: convert it first, as `iconv"):
        run_chat(server)
    assert not server.requests


def test_a_typed_line_that_is_no_text_is_left_out(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.replies = [Reply(plain_stream(["a"]))]
    type_lines(monkeypatch, "caf\udce9?", "caf\u00e9?")
    assert run_chat(server) == 0
    assert [request["messages"][-1]["content"] for request in server.requests] == ["caf\u00e9?"]
    assert "error: that was no UTF-8 text: write it again.\n" in capsys.readouterr().err


def test_no_server_is_one_line_with_a_remedy(pipe: io.StringIO, capsys: Captured) -> None:
    assert run_chat(ScriptedServer(url="http://127.0.0.1:9")) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: cannot connect to http://127.0.0.1:9. Is the server running? Start one")
    assert err.count("\n") == 1


def test_a_server_without_models_asks_for_a_name(server: ScriptedServer, pipe: io.StringIO, capsys: Captured) -> None:
    server.models = {"data": []}
    assert run_chat(server) == 1
    assert "lists no model. Name one with --model." in capsys.readouterr().err
