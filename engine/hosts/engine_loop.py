"""The engine's loop: messages in, steps, reports out. It knows no request's meaning and no text, and owns the core.

LoRA adapters are read in a thread beside it, one after the other, and only taken over between two steps.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.events import LoopEvent, Message, StepReport, StepStarted
from hamburger.engine.types.messages import AbortRequest, LoadLora, LoraLoaded, SubmitRequest, UnloadLora

logger = logging.getLogger(__name__)

LORA_THREAD = "hamburger-lora"  # the name of the one that reads an adapter


@dataclass(frozen=True, slots=True)
class LoraRead:
    """The loop's thread for adapters -> loop: one was read. error, is_fault: as LoraLoaded has them."""

    number: int
    error: str | None
    is_fault: bool = False


Inbox = queue.SimpleQueue[Message | LoraRead]


def run_loop(
    core: EngineCore,
    inbox: Inbox,
    deliver: Callable[[LoopEvent], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run steps while there is work, until Stop. Raises what a step raises. clock: time.monotonic() seconds."""
    received, goes_on = list[int](), False
    loads = _LoraLoads(core, inbox, deliver)
    while True:
        for message in _messages(inbox, block=not core.has_work):
            if isinstance(message, SubmitRequest):
                core.add(message)
                received.append(message.number)
            elif isinstance(message, LoadLora):
                loads.load(message)
            elif isinstance(message, LoraRead):
                loads.take(message)
            elif isinstance(message, UnloadLora):
                loads.unload(message)
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


class _LoraLoads:
    """The adapters on their way into a core, in the order of their messages. Each LoadLora is answered once, unless the
    loop ends before; who waits hears of that. One that is being read then is left to itself: nothing takes it."""

    def __init__(self, core: EngineCore, inbox: Inbox, deliver: Callable[[LoopEvent], None]) -> None:
        self._core, self._inbox, self._deliver = core, inbox, deliver
        self._waiting: deque[LoadLora] = deque()
        self._is_reading = False

    def load(self, request: LoadLora) -> None:
        self._waiting.append(request)
        self._read_next()

    def take(self, read: LoraRead) -> None:
        self._is_reading = False
        self._core.end_lora(read.number, read.error)
        self._deliver(LoraLoaded(read.number, read.error, read.is_fault))
        self._read_next()

    def unload(self, request: UnloadLora) -> None:
        """Whether it is loaded, being read or waits to be."""
        self._core.unload_lora(request)
        for waiting in [load for load in self._waiting if load.number == request.number]:
            self._waiting.remove(waiting)
            self._deliver(LoraLoaded(waiting.number, "The LoRA adapter was unloaded before it was read."))

    def _read_next(self) -> None:
        while self._waiting and not self._is_reading:
            request = self._waiting.popleft()
            if (error := self._core.begin_lora(request)) is not None:
                self._deliver(LoraLoaded(request.number, error))
                continue
            self._is_reading = True
            threading.Thread(target=self._read, args=(request,), name=LORA_THREAD, daemon=True).start()

    def _read(self, request: LoadLora) -> None:
        """(thread) The step that runs meanwhile knows nothing of it."""
        is_fault = False
        try:
            error = self._core.read_lora(request)
        except Exception as fault:  # the thread's one boundary: no answer that runs is to end of it
            logger.exception("The LoRA adapter %s cannot be read.", request.path)
            error = f"{request.path} cannot be read, by a fault of the server ({type(fault).__name__}: {fault})."
            is_fault = True
        self._inbox.put(LoraRead(request.number, error, is_fault))


def _messages(inbox: Inbox, *, block: bool) -> Iterator[Message | LoraRead]:
    if block:
        yield inbox.get()
    while not inbox.empty():
        yield inbox.get()
