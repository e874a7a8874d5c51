"""The terminal chat against a real HTTP server: what it sends, shows and says when things go wrong."""

from __future__ import annotations

import argparse
import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from hamburger.clients import chat
from hamburger.clients.chat_answer import Painter, summary
from hamburger.clients.figures import Answer
from hamburger.clients.wire import StreamDecoder, StreamEvent, Usage
from scripted_server import Reply, ScriptedServer, drafting_stream, error_body, hamburger_stream, plain_stream, sse

Captured = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_chat(server: ScriptedServer, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return chat.run(parser.parse_args(["--url", server.url, *arguments]))


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard input as a pipe; `say` fills it."""
    stdin = io.StringIO()
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


def say(stdin: io.StringIO, *lines: str) -> None:
    stdin.write("".join(f"{line}\n" for line in lines))
    stdin.seek(0)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Make standard input a terminal at which these lines, then Ctrl-D, are typed; an exception is raised instead."""
    typed = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)


@pytest.fixture(autouse=True)
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where these tests' typed lines are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "hamburger" / "chat_history"


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


def test_commands_change_the_next_request(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.replies = [Reply(hamburger_stream([("ok", 1)]))]
    type_lines(
        monkeypatch,
        "/help",
        "/confidence 0.9",
        "/system Speak like a pirate.",
        "one",
        "/clear",
        "/confidence 2",
        "two",
        "/confidence",
        "/system",
        "/nonsense",
        "three",
        "/exit",
        "never sent",
    )
    assert run_chat(server) == 0
    one, two, three = server.requests
    pirate = {"role": "system", "content": "Speak like a pirate."}
    assert (one["confidence"], one["messages"]) == (0.9, [pirate, {"role": "user", "content": "one"}])
    assert (two["confidence"], two["messages"]) == (0.9, [pirate, {"role": "user", "content": "two"}])
    assert "confidence" not in three
    assert [m["content"] for m in three["messages"]] == ["two", "ok", "three"]
    err = capsys.readouterr().err
    assert "forget the conversation" in err
    assert "error: '2' is not a number from 0 to 1" in err
    assert "/nonsense is no command" in err


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_the_prompt_is_left_cleanly(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    type_lines(monkeypatch, end)
    assert run_chat(server) == 0
    assert not server.requests


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
        "from hamburger.clients import chat\nparser = argparse.ArgumentParser()\n"
        "chat.add_arguments(parser)\nsys.exit(chat.run(parser.parse_args()))"
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


def test_no_server_is_one_line_with_a_remedy(pipe: io.StringIO, capsys: Captured) -> None:
    assert run_chat(ScriptedServer(url="http://127.0.0.1:9")) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: cannot connect to http://127.0.0.1:9. Is the server running? Start one")
    assert err.count("\n") == 1


def test_a_server_without_models_asks_for_a_name(server: ScriptedServer, pipe: io.StringIO, capsys: Captured) -> None:
    server.models = {"data": []}
    assert run_chat(server) == 1
    assert "lists no model. Name one with --model." in capsys.readouterr().err


def test_neighbouring_groups_differ_in_colour_and_control_characters_stay_out() -> None:
    file = io.StringIO()
    painter = Painter(Console(file=file, force_terminal=True, color_system="standard", highlight=False))
    events = [("a\x1b[2J", 0), ("", 1), ("b\tc", 2), ("d", 2), ("e\n", 3)]
    for text, index in events:
        painter.show(StreamEvent(text, [1], index))
    painter.end_line()
    cyan, yellow = "\x1b[36m", "\x1b[33m"
    written = file.getvalue().replace("\x1b[0m", "")
    assert written == f"{yellow}a[2J{cyan}b\tc{cyan}d{yellow}e\n"
    assert painter.text == "a\x1b[2Jb\tcde\n"


def test_the_summary_of_nothing_and_of_a_usual_answer() -> None:
    assert summary(Answer(1.0), stopped=True) == "0 tokens · stopped"
    answer = Answer(1.0)
    for now in (1.5, 2.5):
        answer.add(StreamEvent("a", [1, 2, 3], 0), now)
    answer.add(StreamEvent(usage=Usage(9, 5, 2)), 3.0)
    text = "5 tokens · 2 KV slots · 2.50 tokens per KV · 4.0 tokens/s · first token after 0.50 s"
    assert summary(answer, stopped=False) == text


def test_verified_groups_show_steps_and_drafts(server: ScriptedServer, pipe: io.StringIO, capsys: Captured) -> None:
    say(pipe, "hello")
    server.replies = [Reply(drafting_stream())]
    assert run_chat(server) == 0
    printed = capsys.readouterr()
    assert printed.out == "one two three four\n"
    assert printed.err.startswith("6 tokens · 6 KV slots · 2.00 tokens per step · 3 of 5 drafts accepted · ")


def test_a_group_with_accepted_drafts_is_bold() -> None:
    file = io.StringIO()
    painter = Painter(Console(file=file, force_terminal=True, color_system="standard", highlight=False))
    for index, accepted in enumerate([0, 2, 0]):
        painter.show(StreamEvent("x", [1] * (1 + accepted), index, num_drafted=3, num_accepted=accepted))
    cyan, yellow = "\x1b[36m", "\x1b[33m"
    assert file.getvalue().replace("\x1b[0m", "") == f"{yellow}x{cyan.replace('[', '[1;')}x{yellow}x"


def test_an_answer_that_was_stopped_counts_slots_and_steps_by_its_groups() -> None:
    answer, decoder = Answer(1.0), StreamDecoder()
    for chunk in drafting_stream()[:2]:
        for event in decoder.feed(chunk):
            answer.add(event, 2.0)
    text = "4 tokens · 4 KV slots · 2.00 tokens per step · 2 of 3 drafts accepted · first token after 1.00 s · stopped"
    assert summary(answer, stopped=True) == text


def test_an_answer_that_settles_shows_tokens_per_kv_and_per_step() -> None:
    answer = Answer(1.0)
    answer.add(StreamEvent("a", [1, 2], 0, num_drafted=1, num_accepted=1), 2.0)
    answer.add(StreamEvent(usage=Usage(9, 1024, 470, macro_steps=640)), 3.0)
    told = summary(answer, stopped=False)
    assert told.startswith("1024 tokens · 470 KV slots · 2.18 tokens per KV · 1.60 tokens per step · ")


def test_what_a_growing_answer_holds_is_the_terminals_title(server: ScriptedServer, pipe: io.StringIO) -> None:
    file = io.StringIO()
    out, err = Console(file=file, force_terminal=True, highlight=False), Console(stderr=True)
    talk = chat.Conversation("m", counts_live=True, messages=[{"role": "user", "content": "hello"}])
    server.replies = [Reply(drafting_stream())]
    with httpx.Client(base_url=server.url) as client:
        assert not chat._answer(client, talk, out, err)
    assert server.requests[-1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    titles = re.findall(r"\x1b\]0;([^\x07]*)\x07", file.getvalue())
    assert titles[0] == "1 tokens in 1 KV slots"
    assert titles[-1] == "6 tokens in 6 KV slots"


def test_a_question_may_have_several_lines(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies = [Reply(plain_stream(["a"]))]
    type_lines(
        monkeypatch, "one \\", "and \\", "more", '"""def f():', "    pass", "", '"""', '"""short"""', "back\\slash"
    )
    assert run_chat(server) == 0
    asked = [request["messages"][-1]["content"] for request in server.requests]
    assert asked == ["one \nand \nmore", "def f():\n    pass", "short", "back\\slash"]


def test_typed_lines_are_remembered_for_their_owner_alone(history: Path) -> None:
    """In a process of its own: readline is one for all of this one."""
    program = (
        "import readline, sys\nfrom hamburger.clients import typed_lines\n"
        "def read(prompt):\n    readline.add_history(line := next(lines))\n    return line\n"
        "def end():\n    raise EOFError\n"
        "lines = iter(sys.argv[1:])\n"
        "import builtins\nbuiltins.input = lambda prompt: read(prompt) if lines.__length_hint__() else end()\n"
        "print(readline.get_current_history_length(), list(typed_lines.typed_lines(True)))"
        "\nprint([readline.get_history_item(i + 1) for i in range(readline.get_current_history_length())])"
    )
    for asked, known in ((["one", "two"], "['one', 'two']"), (["three"], "['one', 'two', 'three']")):
        run = subprocess.run([sys.executable, "-c", program, *asked], capture_output=True, text=True, check=True)
        assert run.stdout.splitlines() == [f"0 {asked}", known]
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_race_asks_with_drafts_and_without_and_stays_out_of_the_conversation(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fast, slow = hamburger_stream([("ab", 2), ("cd", 2)]), hamburger_stream([("a", 1), ("b", 1), ("c", 1), ("d", 1)])
    server.answer = lambda body: Reply(slow if body.get("confidence") == 1 else fast)
    type_lines(monkeypatch, "/race", "one", "/race two", "/race", "three")
    assert run_chat(server, "--temperature", "0.7") == 0
    first, *raced, last = server.requests
    assert [[m["content"] for m in request["messages"]] for request in raced] == [
        *[["one", "abcd", "two"]] * 2,
        *[["one"]] * 2,
    ]
    assert [request.get("confidence") for request in raced] == [None, 1] * 2
    assert {request["seed"] for request in raced} == {1}
    assert "seed" not in first
    assert [m["content"] for m in last["messages"]] == ["one", "abcd", "three"]
    printed = capsys.readouterr()
    assert printed.out == "abcd\n" * 6
    assert "there is none yet" in printed.err
    assert printed.err.count("as asked       4 tokens · 2 KV slots") == 2
    assert printed.err.count("at confidence 1 4 tokens · 4 KV slots") == 2
    assert len(re.findall(r"The same text, [0-9.]+ times as fast\.", printed.err)) == 2


def test_a_race_tells_where_texts_part(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fast, slow = hamburger_stream([("ab", 2), ("xd", 2)]), hamburger_stream([("a", 1), ("b", 1), ("c", 1), ("d", 1)])
    server.answer = lambda body: Reply(slow if body.get("confidence") == 1 else fast)
    type_lines(monkeypatch, "/race one")
    assert run_chat(server) == 0
    assert "Another text from character 3 on" in capsys.readouterr().err


def test_an_error_in_a_race_ends_no_chat(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.replies = [Reply(body=error_body("No.", 400), status=400), Reply(plain_stream(["a"]))]
    type_lines(monkeypatch, "/race one", "two")
    assert run_chat(server) == 0
    printed = capsys.readouterr()
    assert "error: HTTP 400: No." in printed.err
    assert printed.out == "a\n"


def test_a_piped_command_that_fails_ends_it_too(server: ScriptedServer, pipe: io.StringIO, capsys: Captured) -> None:
    half = hamburger_stream([("half", 1), ("", 1)])[0]
    server.replies = [Reply([half, sse(error_body("the engine died", 500))])]
    say(pipe, "/race one", "two")
    assert run_chat(server) == 1
    printed = capsys.readouterr()
    assert printed.out == "half\n"
    assert "error: error in the stream: the engine died" in printed.err
    assert len(server.requests) == 1


METRICS = """\
# HELP hamburger_num_requests_running x
hamburger_num_requests_running{model_name="tiny"} 2.0
hamburger_num_requests_waiting{model_name="tiny"} 1.0
hamburger_num_requests_running{model_name="other"} 9.0
hamburger_kv_cache_usage_perc{model_name="tiny"} 0.125
hamburger_generation_tokens_per_second{model_name="tiny"} 321.25
hamburger_tokens_per_macro_step{model_name="tiny"} 2.0
hamburger_tokens_per_kv_ratio{model_name="tiny"} 1.0
hamburger_drafted_tokens_total{model_name="tiny",drafter="micro",position="1"} 60.0
hamburger_drafted_tokens_total{model_name="tiny",drafter="lookup",position="1"} 40.0
hamburger_accepted_tokens_total{model_name="tiny",drafter="micro",position="1"} 45.0
process_cpu_seconds_total 3.0
"""


def test_stats_say_what_the_server_does(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.metrics = METRICS
    type_lines(monkeypatch, "/stats")
    assert run_chat(server, "--model", "tiny@0.9") == 0
    assert capsys.readouterr().err.splitlines()[1] == (
        "2 running, 1 waiting · 12.5 % of the KV slots in use · 321.2 tokens/s · 2.00 tokens per step · "
        "1.00 tokens per KV · 45 % of 100 drafts accepted since its start"
    )


def test_stats_of_another_kind_of_server_are_one_line(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    type_lines(monkeypatch, "/stats", "/stats")
    server.metrics = "vllm:num_requests_running 1.0\n"
    assert run_chat(server) == 0
    assert capsys.readouterr().err.count("tells nothing of tiny. Is it a HAMburger server?") == 2
    server.metrics = None
    type_lines(monkeypatch, "/stats")
    assert run_chat(server) == 0
    assert "error: HTTP 404" in capsys.readouterr().err
