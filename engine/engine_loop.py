"""The engine's loop: messages in, steps, reports out. It knows no request's meaning and no text, and owns the core."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.events import LoopEvent, Message, StepReport, StepStarted
from hamburger.engine.types.messages import AbortRequest, LoadLora, LoraLoaded, SubmitRequest, UnloadLora

Inbox = queue.SimpleQueue[Message]


def run_loop(
    core: EngineCore,
    inbox: Inbox,
    deliver: Callable[[LoopEvent], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run steps while there is work, until Stop. Raises what a step raises. clock: time.monotonic() seconds."""
    received, goes_on = list[int](), False
    while True:
        for message in _messages(inbox, block=not core.has_work):
            if isinstance(message, SubmitRequest):
                core.add(message)
                received.append(message.number)
            elif isinstance(message, LoadLora):
                deliver(LoraLoaded(message.number, core.load_lora(message)))
            elif isinstance(message, UnloadLora):
                core.unload_lora(message)
            elif isinstance(message, AbortRequest):
                core.abort(message)
            else:
                outputs = core.fail_all("draining", "The server is shutting down; the answer was cut short.")
                deliver(StepReport(outputs, received, clock(), goes_on=False))
                return
        if not goes_on:
            deliver(StepStarted(clock()))
        outputs = core.step()  # also when an abort left nothing to do: its report takes the gauges to zero
        goes_on = core.has_work
        deliver(StepReport(outputs, received, clock(), goes_on))
        received = []


def _messages(inbox: Inbox, *, block: bool) -> Iterator[Message]:
    if block:
        yield inbox.get()
    while not inbox.empty():
        yield inbox.get()
