"""`hamburger chat`: a conversation in the terminal with any OpenAI-compatible server.

Answers go to stdout; figures, hints and errors go to stderr, so that a pipe carries nothing but answers.
Speaks HTTP only; must not import hamburger.server, engine or model.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from hamburger.clients.arguments import add_server_arguments, count, non_negative, unit_interval
from hamburger.clients.figures import Answer, ratio
from hamburger.clients.wire import (
    RequestError,
    StreamDecoder,
    StreamEvent,
    check_stream,
    client_options,
    first_model,
    transport_error,
)

HELP = """\
/confidence C   0 to 1, higher is safer and slower; alone: the server's default
/system TEXT    the system message from now on; alone: none
/clear          forget the conversation (the system message stays)
/help           this text
/exit           leave (also Ctrl-D); Ctrl-C stops an answer"""
HINT_400 = "A conversation that grew too long: /clear. A server that rejects unknown fields: --no-colour-groups."
GROUP_COLOURS = ("cyan", "yellow")
_LONGEST_SILENCE = 600.0  # seconds: a long prompt on a slow machine is silent for minutes
_CONTROL_CHARACTERS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


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

    def body(self) -> dict[str, Any]:
        """The request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        options = {"confidence": self.confidence, "temperature": self.temperature, "max_tokens": self.max_tokens}
        return {
            "model": self.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True, **({"continuous_usage_stats": True} if self.counts_live else {})},
            **({"return_groups": True} if self.groups else {}),
            **{name: value for name, value in options.items() if value is not None},
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger chat`."""
    add_server_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: none)")
    parser.add_argument(
        "--confidence", type=unit_interval, metavar="C", help="0 to 1, higher is safer and slower (default: server's)"
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
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
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
            with contextlib.suppress(ImportError):  # line editing and history, where the platform has them
                importlib.import_module("readline")
            err.print(f"{model} at {args.url}: /help for commands, Ctrl-D to leave.", style="dim", markup=False)
        return _converse(client, chat, _questions(interactive), interactive, out, err)


def _converse(
    client: httpx.Client, chat: Conversation, questions: Iterator[str], interactive: bool, out: Console, err: Console
) -> int:
    for question in questions:
        if question.startswith("/"):
            if question.split()[0] == "/exit":
                break
            _command(chat, question, err)
            continue
        chat.messages.append({"role": "user", "content": question})
        try:
            stopped = _answer(client, chat, out, err)
        except RequestError as error:
            chat.messages.pop()  # so that asking again does not ask twice
            _complain(err, error)
            if error.status == 400:
                err.print(HINT_400, style="dim", markup=False, soft_wrap=True)
            stopped = False
            if not interactive:
                return 1
        if stopped and not interactive:
            return 130
    return 0


def _questions(interactive: bool) -> Iterator[str]:
    """Non-empty lines until the end of input or a Ctrl-C at the prompt."""
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if not interactive and not line:
            return
        if line.strip():
            yield line.strip()


def _command(chat: Conversation, line: str, err: Console) -> None:
    """Carry out one slash command other than /exit and print the new state."""
    name, _, value = line.partition(" ")
    value = value.strip()
    if name == "/clear":
        chat.messages.clear()
        said = "The conversation is forgotten."
    elif name == "/system":
        chat.system = value or None
        said = f"System message: {chat.system or 'none'}"
    elif name == "/confidence":
        try:
            chat.confidence = unit_interval(value) if value else None
        except argparse.ArgumentTypeError as error:
            _complain(err, error)
            return
        said = f"Confidence: {'the default of the server' if chat.confidence is None else chat.confidence}"
    else:
        said = HELP if name == "/help" else f"{name} is no command. /help lists them."
    err.print(said, style="dim", markup=False)


def _answer(client: httpx.Client, chat: Conversation, out: Console, err: Console) -> bool:
    """Stream one answer to `out`, remember it, print its figures. Returns whether Ctrl-C stopped it.

    Raises RequestError; what had arrived by then has been shown.
    """
    answer = Answer(time.perf_counter())
    painter = _Painter(out)
    stopped = False
    try:
        with contextlib.closing(_stream(client, chat.body())) as events:
            for event in events:
                answer.add(event, time.perf_counter())
                painter.show(event)
                if chat.counts_live and answer.kv_slots is not None:
                    painter.tell(f"{answer.completion_tokens} tokens in {answer.kv_slots} KV slots")
    except KeyboardInterrupt:
        stopped = True  # leaving the stream has closed the connection, which frees the server's slots
    finally:
        painter.end_line()
    if painter.text:
        chat.messages.append({"role": "assistant", "content": painter.text})
    else:
        chat.messages.pop()  # nothing was said: a question without an answer would confuse the next turn
    err.print(summary(answer, stopped), style="dim", markup=False, soft_wrap=True)
    return stopped


def _stream(client: httpx.Client, body: dict[str, Any]) -> Generator[StreamEvent, None, None]:
    decoder = StreamDecoder()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
            check_stream(response)
            for chunk in response.iter_bytes():
                yield from decoder.feed(chunk)
            yield from decoder.close()
    except httpx.HTTPError as error:
        raise transport_error(error, client.base_url) from error


class _Painter:
    """Writes an answer as it arrives, each group in the other colour than the one before.

    A group that accepted drafts bring tokens to is bold.
    """

    def __init__(self, out: Console) -> None:
        self._out = out
        self._group: int | None = None  # index of the last group that showed text
        self._style = 0
        self._is_bold = False
        self.text = ""
        self._title = ""

    def show(self, event: StreamEvent) -> None:
        if not event.text:
            return
        if event.group_index is not None and event.group_index != self._group:
            self._style, self._group = 1 - self._style, event.group_index
            self._is_bold = event.num_accepted > 0
        self.text += event.text
        # An answer must not be able to move the cursor or set the title: only text reaches the terminal.
        shown = event.text.translate(_CONTROL_CHARACTERS)
        style = None if self._group is None else Style(color=GROUP_COLOURS[self._style], bold=self._is_bold or None)
        # A bare segment: the console's other ways of printing would wrap lines and turn tabs into spaces.
        self._out.print(Segments([Segment(shown, style)]), end="", soft_wrap=True)

    def tell(self, title: str) -> None:
        """In the terminal's title, where the text is not in the way."""
        if title != self._title:
            self._title = title
            self._out.set_window_title(title)

    def end_line(self) -> None:
        if self.text and not self.text.endswith("\n"):
            self._out.print()


def summary(answer: Answer, stopped: bool) -> str:
    """The line under an answer: tokens, KV slots, tokens per KV or step, drafts, tokens/s (1 / TPOT), time to first
    token."""
    tokens, slots, steps, tpot = answer.completion_tokens, answer.kv_slots, answer.macro_steps, answer.tpot
    tokens_per_kv, tokens_per_step = ratio(tokens, slots), ratio(tokens, steps)
    if steps != slots == tokens:  # each token has a slot: how many of them a KV has says nothing
        tokens_per_kv = None
    parts = [
        f"{tokens} token{'' if tokens == 1 else 's'}",
        f"{slots} KV slot{'' if slots == 1 else 's'}" if slots is not None else "",
        f"{tokens_per_kv:.2f} tokens per KV" if tokens_per_kv is not None else "",
        f"{tokens_per_step:.2f} tokens per step" if steps != slots and tokens_per_step is not None else "",
        f"{answer.num_accepted} of {answer.num_drafted} drafts accepted" if answer.num_drafted else "",
        f"{1 / tpot:.1f} tokens/s" if tpot else "",
        f"first token after {answer.ttft:.2f} s" if answer.ttft is not None else "",
        "stopped" if stopped else "cut at the token limit" if answer.finish_reason == "length" else "",
    ]
    return " · ".join(part for part in parts if part)


def _complain(err: Console, error: Exception) -> None:
    err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
