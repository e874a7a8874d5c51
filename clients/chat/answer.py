"""One streamed answer in the terminal: its events, its text in colours, and the line of figures under it."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import Any

import httpx
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from hamburger.clients.connection import check_stream, is_stream, silent, transport_error
from hamburger.clients.figures import Answer, ratio
from hamburger.clients.wire import StreamDecoder, StreamEvent

GROUP_COLOURS = ("cyan", "yellow")
_HALVES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # of surrogate pairs: JSON can hold them, and no text can
_CONTROL_CHARACTERS = {code: "" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
_UNSHOWN = _CONTROL_CHARACTERS | _HALVES


def stream_events(client: httpx.Client, body: dict[str, Any]) -> Generator[tuple[StreamEvent, float], None, None]:
    """The events of one answer, asked for with that body, and when each was read (time.perf_counter()).

    Raises RequestError.
    """
    decoder = StreamDecoder()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if not is_stream(response):
                response.read()
            check_stream(response)
            heard = time.perf_counter()
            for chunk in response.iter_bytes():
                now = time.perf_counter()
                if events := decoder.feed(chunk):
                    yield from ((event, now) for event in events)
                    heard = time.perf_counter()
                elif now - heard > (client.timeout.read or math.inf):  # pings alone
                    raise silent(client.base_url)
                if decoder.is_done:  # not every server or proxy ends the connection then
                    break
            now = time.perf_counter()
            yield from ((event, now) for event in decoder.close())
    except httpx.HTTPError as error:
        raise transport_error(error, client.base_url) from error


class Painter:
    """Writes an answer as it arrives, each group in the other colour than the one before.

    A group that accepted drafts bring tokens to is bold. What the model writes for itself is dim, and for terminals
    alone: it is none of the answer.
    """

    def __init__(self, out: Console) -> None:
        self._out = out
        self._group: int | None = None  # index of the last group that showed text
        self._style = 0
        self._is_bold = False
        self.text = ""
        self._shown = ""  # last, of thoughts or text
        self._is_thinking = False
        self._title = ""

    def show(self, event: StreamEvent) -> None:
        if event.thought and self._out.is_terminal:
            self._is_thinking = True
            self._print(event.thought, Style(dim=True))
        if not event.text:
            return
        if self._is_thinking:
            self._is_thinking = False
            self.end_line()
        if event.group_index is not None and event.group_index != self._group:
            self._style, self._group = 1 - self._style, event.group_index
            self._is_bold = event.num_accepted > 0
        self.text += event.text.translate(_HALVES)  # it is sent back with the next question
        style = None if self._group is None else Style(color=GROUP_COLOURS[self._style], bold=self._is_bold or None)
        self._print(event.text, style)

    def _print(self, text: str, style: Style | None) -> None:
        self._shown = text
        # An answer must not be able to move the cursor or set the title: only text reaches the terminal.
        shown = text.translate(_UNSHOWN)
        # A bare segment: the console's other ways of printing would wrap lines and turn tabs into spaces.
        self._out.print(Segments([Segment(shown, style)]), end="", soft_wrap=True)

    def tell(self, title: str) -> None:
        """In the terminal's title, where the text is not in the way; "" in the end leaves it to the terminal again."""
        if title != self._title:
            self._title = title
            self._out.set_window_title(title)

    def end_line(self) -> None:
        if self._shown and not self._shown.endswith("\n"):
            self._out.print()


def summary(answer: Answer, stopped: bool, has_drafts: bool = False) -> str:
    """The line under an answer: tokens, KV slots, tokens per KV or step, drafts, tokens/s (1 / TPOT), time to first
    token.

    has_drafts: tell tokens per step also of an answer without drafts, as it stands beside one that has some.
    """
    tokens, slots, steps, tpot = answer.completion_tokens, answer.kv_slots, answer.macro_steps, answer.tpot
    tokens_per_kv, tokens_per_step = ratio(tokens, slots), ratio(tokens, steps)
    is_by_step = has_drafts or answer.num_drafted is not None or steps != slots
    if is_by_step and slots == tokens:  # each token has a slot: how many of them a KV has says nothing
        tokens_per_kv = None
    parts = [
        f"{tokens} token{'' if tokens == 1 else 's'}",
        f"{slots} KV slot{'' if slots == 1 else 's'}" if slots is not None else "",
        f"{tokens_per_kv:.2f} tokens per KV" if tokens_per_kv is not None else "",
        f"{tokens_per_step:.2f} tokens per step" if is_by_step and tokens_per_step is not None else "",
        f"{answer.num_accepted} of {answer.num_drafted} drafts accepted" if answer.num_drafted else "",
        f"{1 / tpot:.1f} tokens/s" if tpot else "",
        f"first token after {answer.ttft:.2f} s" if answer.ttft is not None else "",
        "stopped" if stopped else "cut at the token limit" if answer.finish_reason == "length" else "",
    ]
    return " · ".join(part for part in parts if part)
