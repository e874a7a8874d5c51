"""What is typed in the terminal chat: commands, lines and the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chat_terminal import Captured, run_chat, type_lines
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
    assert "error: '2' is not a number from 0 to 1" in err
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


def test_typed_lines_are_remembered_for_their_owner_alone(history: Path) -> None:
    """In a process of its own: readline is one for all of this one."""
    program = (
        "import readline, sys\nfrom hamburger.clients.chat import typed_lines\n"
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
