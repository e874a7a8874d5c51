"""`/race` of the chat: one question with drafts, then without: the same text, in how much less time?"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import httpx
from rich.console import Console

from hamburger.clients.chat.answer import Painter, stream_events, summary
from hamburger.clients.figures import Answer

_SEED = 1  # sampled texts are the same only with the same noise


def race(client: httpx.Client, body: dict[str, Any], out: Console) -> str:
    """Ask as the chat would, then at confidence 1, both shown; returns the verdict. Raises RequestError."""
    # With a cache of its own each: else the first would read the prompt for the second.
    asked = [{"seed": _SEED, **body, "cache_salt": f"race {time.time()} {lane}"} for lane in range(2)]
    lanes = (asked[0], {**asked[1], "confidence": 1})
    texts, figures = [], []
    for lane in lanes:
        answer, painter = Answer(time.perf_counter()), Painter(out)
        try:
            with contextlib.closing(stream_events(client, lane)) as events:
                for event, now in events:
                    answer.add(event, now)
                    painter.show(event)
        finally:
            painter.end_line()
        texts.append(painter.text)
        figures.append(answer)
    named = zip(("as asked      ", "at confidence 1"), figures, strict=True)
    has_drafts = any(answer.num_drafted is not None for answer in figures)
    lines = [f"{name} {summary(answer, stopped=False, has_drafts=has_drafts)}" for name, answer in named]
    return "\n".join([*lines, _verdict(texts, figures)])


def _verdict(texts: list[str], figures: list[Answer]) -> str:
    first, second = texts
    speeds = [answer.tpot for answer in figures]
    if not speeds[0] or not speeds[1]:  # 0: all of it came at once
        return "Too short a race to tell anything."
    gain = f"{speeds[1] / speeds[0]:.2f} times as fast"
    if first == second:
        return f"The same text, {gain}."
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, texts)))
    return f"Another text from character {same + 1} on (groups are composed, or the server has no seeds), {gain}."
