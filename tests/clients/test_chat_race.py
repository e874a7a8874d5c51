"""`/race` of the terminal chat: one question with drafts and without."""

from __future__ import annotations

import io
import re

import pytest

from chat_terminal import Captured, run_chat, say, type_lines
from hamburger.clients.chat.answer import Painter
from hamburger.clients.wire import StreamEvent
from scripted_server import (
    Reply,
    ScriptedServer,
    drafting_stream,
    error_body,
    hamburger_stream,
    plain_stream,
    sse,
)


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
    assert len({request["cache_salt"] for request in raced}) == 4  # no lane reads the prompt for another
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


def test_a_race_of_answers_that_come_at_once_tells_no_speed(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 5}
    whole = {"choices": [{"delta": {"content": "all of it"}, "finish_reason": "stop"}], "usage": usage}
    server.answer = lambda body: Reply([sse(whole), b"data: [DONE]\n\n"])
    type_lines(monkeypatch, "/race one")
    assert run_chat(server) == 0
    assert "Too short a race to tell anything." in capsys.readouterr().err


def test_a_race_needs_more_than_openai_s_fields(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    type_lines(monkeypatch, "/race one")
    assert run_chat(server, "--no-colour-groups") == 0
    assert "leave --no-colour-groups out" in capsys.readouterr().err
    assert not server.requests


def test_both_lines_of_a_race_tell_tokens_per_step_where_one_had_drafts(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    slow = hamburger_stream([(text, 1) for text in ("one", " two", " three", " four")])
    server.answer = lambda body: Reply(slow if body.get("confidence") == 1 else drafting_stream())
    type_lines(monkeypatch, "/race one")
    assert run_chat(server) == 0
    err = capsys.readouterr().err
    assert "as asked       6 tokens · 6 KV slots · 2.00 tokens per step · 3 of 5 drafts accepted" in err
    assert "at confidence 1 4 tokens · 4 KV slots · 1.00 tokens per step" in err
    assert "per KV" not in err


def test_ctrl_c_stops_a_race_and_keeps_the_conversation(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.replies = [Reply(plain_stream(["a"]))]
    show = Painter.show

    def press(painter: Painter, event: StreamEvent) -> None:
        if len(server.requests) == 2:
            raise KeyboardInterrupt
        show(painter, event)

    monkeypatch.setattr(Painter, "show", press)
    type_lines(monkeypatch, "one", "/race", "two")
    assert run_chat(server) == 0
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["one", "a", "two"]
    assert len(server.requests) == 3
    assert "/race was stopped.\n" in capsys.readouterr().err


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
