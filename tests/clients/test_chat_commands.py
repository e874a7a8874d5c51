"""What is typed in the terminal chat: commands, lines and the way out."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from chat_terminal import Captured, run_chat, say, type_lines
from hamburger.clients.chat import command, typed_lines
from scripted_server import Reply, ScriptedServer, hamburger_stream, plain_stream


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
    assert "error: /confidence '2' is not a number from 0 to 1" in err
    assert "/nonsense is no command" in err


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_the_prompt_is_left_cleanly(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    type_lines(monkeypatch, end)
    assert run_chat(server) == 0
    assert not server.requests


def test_a_question_may_have_several_lines(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies = [Reply(plain_stream(["a"]))]
    type_lines(
        monkeypatch, "one \\", "and \\", "more", '"""def f():', "    pass", "", '"""', '"""short"""', "back\\slash"
    )
    assert run_chat(server) == 0
    asked = [request["messages"][-1]["content"] for request in server.requests]
    assert asked == ["one \nand \nmore", "def f():\n    pass", "short", "back\\slash"]


def test_a_quoted_question_is_never_a_command(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies = [Reply(plain_stream(["a"]))]
    type_lines(monkeypatch, '"""/exit"""', '"""', "/clear", "means what?", '"""')
    assert run_chat(server) == 0
    asked = [request["messages"][-1]["content"] for request in server.requests]
    assert asked == ["/exit", "/clear\nmeans what?"]
    assert len(server.requests[1]["messages"]) == 3


def test_a_piped_line_between_quotes_is_a_question_too(server: ScriptedServer, pipe: io.StringIO) -> None:
    server.replies = [Reply(plain_stream(["a"]))]
    say(pipe, '"""/tmp fills up. Why?"""', '""""""', '"""', 'a """doc"""', "/exit", "never sent")
    assert run_chat(server) == 0
    asked = [request["messages"][-1]["content"] for request in server.requests]
    assert asked == ["/tmp fills up. Why?", '"""', 'a """doc"""']


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nonsense", '/nonsense is no command: /help lists them, and a question stands between """.'),
        ("/confidence 7", "/confidence '7' is not a number from 0 to 1"),
        ("/race", "/race TEXT asks that with drafts and without; alone it takes the last question"),
    ],
)
def test_a_piped_command_that_is_wrong_ends_the_chat_with_one_line(
    line: str, message: str, server: ScriptedServer, pipe: io.StringIO, capsys: Captured
) -> None:
    say(pipe, line, "never sent")
    assert run_chat(server) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not server.requests


def press_ctrl_c(client: httpx.Client, model: str) -> str:
    raise KeyboardInterrupt


def test_ctrl_c_stops_a_command_and_keeps_the_conversation(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.replies = [Reply(plain_stream(["a"]))]
    monkeypatch.setattr(command, "server_stats", press_ctrl_c)
    type_lines(monkeypatch, "one", "/stats", "two")
    assert run_chat(server) == 0
    assert [m["content"] for m in server.requests[1]["messages"]] == ["one", "a", "two"]
    assert "/stats was stopped.\n" in capsys.readouterr().err


def test_ctrl_c_in_a_piped_command_ends_the_chat(
    server: ScriptedServer, pipe: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "server_stats", press_ctrl_c)
    say(pipe, "/stats", "never sent")
    assert run_chat(server) == 130
    assert not server.requests


def test_the_help_says_what_confidence_does_to_each_kind_of_groups(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with pytest.raises(SystemExit):
        run_chat(server, "--help")
    type_lines(monkeypatch, "/help")
    assert run_chat(server) == 0
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        told = " ".join(text.split())
        assert "verified groups draft less the higher it is, with the same text; composed ones are safer" in told


def test_typed_lines_are_remembered_for_their_owner_alone(history: Path) -> None:
    """In a process of its own: readline is one for all of this one."""
    program = (
        "import readline, sys\nfrom hamburger.clients.chat import typed_lines\n"
        "def read(prompt):\n    readline.add_history(line := next(lines))\n    return line\n"
        "def end():\n    raise EOFError\n"
        "lines = iter(sys.argv[1:])\n"
        "import builtins\nbuiltins.input = lambda prompt='': read(prompt) if lines.__length_hint__() else end()\n"
        "print(readline.get_current_history_length(), [line.text for line in typed_lines.typed_lines(True)])"
        "\nprint([readline.get_history_item(i + 1) for i in range(readline.get_current_history_length())])"
    )
    for asked, known in ((["one", "two"], "['one', 'two']"), (["three"], "['one', 'two', 'three']")):
        run = subprocess.run([sys.executable, "-c", program, *asked], capture_output=True, text=True, check=True)
        assert run.stdout.splitlines() == [f"0 {asked}", known]
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_its_first_line(
    server: ScriptedServer, pipe: io.StringIO, capsys: Captured
) -> None:
    server.replies = [Reply(hamburger_stream([("a", 1), ("b", 1)]))]
    say(pipe, "\ufeff/system\tBe brief.", "one")
    assert run_chat(server) == 0
    assert [m["content"] for m in server.requests[0]["messages"]] == ["Be brief.", "one"]


def test_a_user_without_a_home_has_no_history(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(typed_lines, "history_path", no_home)
    server.replies = [Reply(hamburger_stream([("a", 1), ("b", 1)]))]
    type_lines(monkeypatch, "one")
    assert run_chat(server) == 0
    assert capsys.readouterr().out == "ab\n"
