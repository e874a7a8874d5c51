"""`hamburger chat`: a conversation in the terminal with any OpenAI-compatible server.

Answers go to stdout; figures, hints and errors go to stderr, so that a pipe carries nothing but answers.
Speaks HTTP only; must not import hamburger.server, engine or model.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from hamburger.clients.arguments import add_server_arguments, count, non_negative, unit_interval, utf8_text
from hamburger.clients.chat.answer import Painter, stream_events, summary
from hamburger.clients.chat.race import race
from hamburger.clients.chat.stats import server_stats
from hamburger.clients.chat.typed_lines import Typed, typed_lines
from hamburger.clients.connection import client_options, first_model
from hamburger.clients.figures import Answer
from hamburger.clients.wire import RequestError

HELP = """\
/race [TEXT]    ask that, or the last question again, with drafts and without: the same text, how fast?
/stats          what the server does right now
/confidence C   0 to 1: verified groups draft less the higher it is, with the same text;
                composed ones are safer and slower; alone: the server's default
/system TEXT    the system message from now on; alone: none
/clear          forget the conversation (the system message stays)
/help           this text
/exit           leave (also Ctrl-D); Ctrl-C stops an answer
A line that ends with \\ goes on in the next one, as do all lines between two \"\"\".
What stands between two \"\"\" is a question, also if it begins with /."""
HINT_400 = "A conversation that grew too long: /clear. A server that rejects unknown fields: --no-colour-groups."
_LONGEST_SILENCE = 600.0  # seconds: a long prompt on a slow machine is silent for minutes


class CommandError(Exception):
    """A slash command that is none, or that cannot be carried out as it was given."""


@dataclass(slots=True)
class Conversation:
    """What has been said, and how the next answer is asked for. `confidence` None takes the server's default."""

    model: str
    system: str | None = None
    confidence: float | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    groups: bool = True
    counts_live: bool = False  # what an answer holds is told while it grows
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self, messages: list[dict[str, str]] | None = None) -> dict[str, Any]:
        """The request for the next answer, or for one to other messages."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        options = {"confidence": self.confidence, "temperature": self.temperature, "max_tokens": self.max_tokens}
        return {
            "model": self.model,
            "messages": system + (self.messages if messages is None else messages),
            "stream": True,
            "stream_options": {"include_usage": True, **({"continuous_usage_stats": True} if self.counts_live else {})},
            **({"return_groups": True} if self.groups else {}),
            **{name: value for name, value in options.items() if value is not None},
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger chat`."""
    add_server_arguments(parser)
    parser.add_argument("--system", type=utf8_text, metavar="TEXT", help="the system message (default: none)")
    parser.add_argument(
        "--confidence",
        type=unit_interval,
        metavar="C",
        help="0 to 1: verified groups draft less the higher it is, with the same text; composed ones are safer and "
        "slower (default: server's)",
    )
    parser.add_argument("--temperature", type=non_negative, metavar="T", help="0 is greedy (default: server's)")
    parser.add_argument("--max-tokens", type=count, metavar="N", help="longest answer in tokens (default: server's)")
    parser.add_argument(
        "--no-colour-groups",
        dest="groups",
        action="store_false",
        help="one colour; asks for no groups, so that servers which reject unknown fields serve too",
    )


def run(args: argparse.Namespace) -> int:
    """Chat until the end of input. Returns 0; at the start or in piped input 1 after an error, 130 after Ctrl-C."""
    err = Console(stderr=True, highlight=False)
    for stream, name, remedy in (
        (sys.stdin, "input", "type the questions in a terminal, or pipe them in."),
        (sys.stdout, "output", "the answers go there (> /dev/null throws them away)."),
    ):
        if stream is None:  # the shell closed it (<&- or >&-)
            _complain(err, f"standard {name} is closed: {remedy}")
            return 1
    # FORCE_COLOR would make a terminal of a pipe, with titles and thoughts.
    out = Console(highlight=False, force_terminal=None if sys.stdout.isatty() else False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding that lacks a character does not end the chat
    with httpx.Client(**client_options(args.url, args.api_key, _LONGEST_SILENCE)) as client:
        try:
            model = args.model or first_model(client)
        except RequestError as error:
            _complain(err, error)
            return 1
        except KeyboardInterrupt:
            return 130
        chat = Conversation(model, args.system, args.confidence, args.temperature, args.max_tokens, args.groups)
        chat.counts_live = out.is_terminal and args.groups
        interactive = sys.stdin.isatty()
        if interactive:
            err.print(f"{model} at {args.url}: /help for commands, Ctrl-D to leave.", style="dim", markup=False)
        return _converse(client, chat, typed_lines(interactive), interactive, out, err)


def _converse(
    client: httpx.Client, chat: Conversation, questions: Iterator[Typed], interactive: bool, out: Console, err: Console
) -> int:
    """Answer one after the other. Returns the exit code; piped input ends with the first that is not 0."""
    for text, is_quoted in questions:
        if is_quoted or not text.startswith("/"):
            code = _ask(client, chat, text, out, err)
        elif text.split()[0] == "/exit":
            break
        else:
            code = _obey(client, chat, text, out, err)
        if code and not interactive:
            return code
    return 0


def _ask(client: httpx.Client, chat: Conversation, question: str, out: Console, err: Console) -> int:
    """Answer one question. Returns 0, 1 after an error that was told, 130 where Ctrl-C stopped it."""
    chat.messages.append({"role": "user", "content": question})
    try:
        return 130 if _answer(client, chat, out, err) else 0
    except RequestError as error:
        chat.messages.pop()  # so that asking again does not ask twice
        _complain(err, error)
        if error.status == 400:
            err.print(HINT_400, style="dim", markup=False, soft_wrap=True)
        return 1


def _obey(client: httpx.Client, chat: Conversation, line: str, out: Console, err: Console) -> int:
    """Carry out one slash command other than /exit. Returns as _ask does."""
    try:
        said = _command(client, chat, line, out)
    except (RequestError, CommandError) as error:
        _complain(err, error)
        return 1
    except KeyboardInterrupt:
        err.print(f"{line.split()[0]} was stopped.", style="dim", markup=False, soft_wrap=True)
        return 130
    err.print(said, style="dim", markup=False, soft_wrap=True)
    return 0


def _command(client: httpx.Client, chat: Conversation, line: str, out: Console) -> str:
    """Carry out one slash command; returns the new state. Raises RequestError or CommandError."""
    name, *rest = line.split(maxsplit=1)
    value = rest[0].strip() if rest else ""
    if name == "/clear":
        chat.messages.clear()
        return "The conversation is forgotten."
    if name == "/system":
        chat.system = value or None
        return f"System message: {chat.system or 'none'}"
    if name == "/confidence":
        try:
            chat.confidence = unit_interval(value) if value else None
        except argparse.ArgumentTypeError as error:
            raise CommandError(f"/confidence {error}") from None
        return f"Confidence: {'the default of the server' if chat.confidence is None else chat.confidence}"
    if name == "/race":
        asked = value or next((m["content"] for m in reversed(chat.messages) if m["role"] == "user"), "")
        if not asked:
            raise CommandError(
                "/race TEXT asks that with drafts and without; alone it takes the last question, and there is none yet."
            )
        if not chat.groups:
            raise CommandError("/race turns drafts off by a field that is not OpenAI's: leave --no-colour-groups out.")
        before = chat.messages if value else _before_last_question(chat.messages)
        return race(client, chat.body([*before, {"role": "user", "content": asked}]), out)
    if name == "/stats":
        return server_stats(client, chat.model)
    if name == "/help":
        return HELP
    raise CommandError(f'{name} is no command: /help lists them, and a question stands between """.')


def _before_last_question(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    return messages[:last]


def _answer(client: httpx.Client, chat: Conversation, out: Console, err: Console) -> bool:
    """Stream one answer to `out`, remember it, print its figures. Returns whether Ctrl-C stopped it.

    Raises RequestError; what had arrived by then has been shown.
    """
    answer = Answer(time.perf_counter())
    painter = Painter(out)
    stopped = False
    try:
        with contextlib.closing(stream_events(client, chat.body())) as events:
            for event, now in events:
                answer.add(event, now)
                painter.show(event)
                if chat.counts_live and answer.kv_slots is not None:
                    painter.tell(f"{answer.completion_tokens} tokens in {answer.kv_slots} KV slots")
    except KeyboardInterrupt:
        stopped = True  # leaving the stream has closed the connection, which frees the server's slots
    finally:
        painter.end_line()
        painter.tell("")
    if painter.text:
        chat.messages.append({"role": "assistant", "content": painter.text})
    else:
        chat.messages.pop()  # nothing was said: a question without an answer would confuse the next turn
    err.print(summary(answer, stopped), style="dim", markup=False, soft_wrap=True)
    return stopped


def _complain(err: Console, error: Exception | str) -> None:
    err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
