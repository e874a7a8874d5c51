"""How the terminal chat shows an answer: its groups in colours, the line of figures under it, the title."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import httpx
import pytest
from rich.console import Console

from chat_terminal import Captured, run_chat, say
from hamburger.clients.chat import command
from hamburger.clients.chat.answer import Painter, summary
from hamburger.clients.figures import Answer
from hamburger.clients.wire import RequestError, StreamDecoder, StreamEvent, Usage
from scripted_server import Reply, ScriptedServer, drafting_stream, hamburger_stream, plain_stream, sse


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


def test_thoughts_are_shown_dim_and_are_no_part_of_the_answer() -> None:
    file = io.StringIO()
    painter = Painter(Console(file=file, force_terminal=True, color_system="standard", highlight=False))
    for event in [
        StreamEvent(thought="Hm, "),
        StreamEvent(thought="so"),
        StreamEvent("Yes", thought="."),
        StreamEvent("!"),
    ]:
        painter.show(event)
    painter.end_line()
    assert file.getvalue().replace("\x1b[0m", "").replace("\x1b[2m", "~") == "~Hm, ~so~.\nYes!\n"
    assert painter.text == "Yes!"


def test_thoughts_are_neither_piped_nor_sent_back(server: ScriptedServer, pipe: io.StringIO, capsys: Captured) -> None:
    deltas: list[dict[str, str]] = [{"reasoning_content": "Hm"}, {"reasoning_content": ".", "content": "Yes"}]
    chunks = [sse({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas]
    end = sse({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    server.replies = [Reply([*chunks, end]), Reply(plain_stream(["a"]))]
    say(pipe, "one", "two")
    assert run_chat(server) == 0
    printed = capsys.readouterr()
    assert printed.out == "Yes\na\n"
    assert printed.err.startswith("2 tokens · ")
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "Yes"}


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
    talk = command.Conversation("m", counts_live=True, messages=[{"role": "user", "content": "hello"}])
    server.replies = [Reply(drafting_stream())]
    with httpx.Client(base_url=server.url) as client:
        assert not command._answer(client, talk, out, err)
    assert server.requests[-1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    titles = re.findall(r"\x1b\]0;([^\x07]*)\x07", file.getvalue())
    assert titles[0] == "1 tokens in 1 KV slots"
    assert titles[-2:] == ["6 tokens in 6 KV slots", ""]  # and then the terminal's own again


def test_the_title_is_the_terminals_again_after_an_answer_that_failed(
    server: ScriptedServer, pipe: io.StringIO
) -> None:
    file = io.StringIO()
    out = Console(file=file, force_terminal=True, highlight=False)
    talk = command.Conversation("m", counts_live=True, messages=[{"role": "user", "content": "hello"}])
    server.replies = [Reply(drafting_stream()[:1])]
    with httpx.Client(base_url=server.url) as client, pytest.raises(RequestError, match="ended before the answer did"):
        command._answer(client, talk, out, out)
    assert re.findall(r"\x1b\]0;([^\x07]*)\x07", file.getvalue()) == ["1 tokens in 1 KV slots", ""]


def test_an_answer_whose_drafts_all_failed_tells_tokens_per_step() -> None:
    answer = Answer(1.0)
    for now in (2.0, 3.0):
        answer.add(StreamEvent("a", [1], 0, num_drafted=3), now)
    told = "2 tokens · 2 KV slots · 1.00 tokens per step · 0 of 6 drafts accepted · 1.0 tokens/s · "
    assert summary(answer, stopped=False).startswith(told)


def test_half_a_surrogate_pair_is_replaced_in_what_is_shown_and_sent_back(
    server: ScriptedServer, pipe: io.StringIO, capsys: Captured
) -> None:
    halves = b'data: {"choices": [{"delta": {"reasoning_content": "\\udc00", "content": "a\\ud83db"}}]}\n\n'
    server.replies = [Reply([halves, b"data: [DONE]\n\n"]), Reply(plain_stream(["c"]))]
    say(pipe, "one", "two")
    assert run_chat(server) == 0
    assert capsys.readouterr().out == "a\ufffdb\nc\n"
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "a\ufffdb"}


def test_an_event_of_a_wrong_type_is_one_line(server: ScriptedServer, pipe: io.StringIO, capsys: Captured) -> None:
    server.replies = [Reply([sse({"choices": [{"delta": {"content": [{"type": "text", "text": "a"}]}}]})])]
    say(pipe, "one")
    assert run_chat(server) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the stream holds an event that makes no sense: {")
    assert err.count("\n") == 1


def test_an_answer_that_is_whole_is_not_waited_for(server: ScriptedServer, pipe: io.StringIO, capsys: Captured) -> None:
    server.replies = [Reply(plain_stream(["Hi"]), hang=True)]
    say(pipe, "one", "two")
    assert run_chat(server) == 0
    assert capsys.readouterr().out == "Hi\nHi\n"


def test_a_pipe_is_no_terminal_whatever_the_environment_says(
    server: ScriptedServer, pipe: io.StringIO, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    server.replies = [Reply([sse({"choices": [{"delta": {"reasoning": "Hm."}}]}), *hamburger_stream([("Hi", 1)])])]
    say(pipe, "one")
    assert run_chat(server) == 0
    assert capsys.readouterr().out == "Hi\n"


def test_what_the_terminal_cannot_show_is_replaced(server: ScriptedServer) -> None:
    server.replies = [Reply(plain_stream(["Gr\u00fc\u00dfe \U0001f354!"]))]
    program = "import sys\nfrom hamburger.server.cli import main\nsys.exit(main(['chat', '--url', sys.argv[1]]))"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", program, server.url]
    run = subprocess.run(command, input=b"one\n", capture_output=True, env=environment, timeout=60, check=True)
    assert run.stdout == b"Gr\xfc\xdfe ?!\n"


def test_pings_alone_are_silence(
    server: ScriptedServer, pipe: io.StringIO, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_LONGEST_SILENCE", 0.3)
    server.replies = [Reply([b": ping\n\n"] * 200, pause=0.05)]
    say(pipe, "one")
    assert run_chat(server) == 1
    assert "fell silent for too long" in capsys.readouterr().err
