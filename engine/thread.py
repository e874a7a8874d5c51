"""EngineThread: the thread that owns the core. Requests go in through a queue, each step's outputs come out at once.

It knows no request's meaning and no text; the core (and torch) are built inside the thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from hamburger.engine.config import EngineConfig
from hamburger.engine.core import EngineCore
from hamburger.engine.messages import AbortRequest, EngineInfo, StepOutputs, SubmitRequest

logger = logging.getLogger(__name__)

BuildCore = Callable[[], tuple[EngineCore, EngineInfo]]
STOP: Final = "stop"
Message = SubmitRequest | AbortRequest | Literal["stop"]


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The core is built."""

    info: EngineInfo
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step. num_received: how many requests the core had been given when it ended, since the start."""

    outputs: StepOutputs
    num_received: int


@dataclass(frozen=True, slots=True)
class EngineStopped:
    """The thread's last words. error: what building or stepping raised; None when it was told to stop."""

    error: BaseException | None


Event = EngineReady | StepReport | EngineStopped


class EngineThread:
    """Calls `deliver` in the engine's thread: EngineReady once, a StepReport a step, and EngineStopped at the end.

    step_started: time.monotonic() of the step in progress, None between steps. step_ended: of the last one's end.
    """

    def __init__(self, build: BuildCore, deliver: Callable[[Event], None]) -> None:
        self.step_started: float | None = None
        self.step_ended = time.monotonic()
        self._build = build
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # A daemon, so that an interpreter that exits without shutdown() does not wait for it.
        self._thread = threading.Thread(target=self._main, name="hamburger-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hand a message to the core before its next step. Never blocks; a stopped thread ignores it."""
        self._inbox.put(message)

    def join(self) -> None:
        self._thread.join()

    def _main(self) -> None:
        error: BaseException | None = None
        core: EngineCore | None = None
        try:
            core, info = self._build()
            self.step_ended = time.monotonic()
            self._deliver(EngineReady(info, core.config))
            self._loop(core)
        except BaseException as caught:  # the thread's one boundary: whatever it is, who waits must hear of it
            if core is not None:  # what building raises, launch raises: its caller reports it
                logger.exception("The engine stopped on an error.")
            error = caught
        self.step_started = None
        self._deliver(EngineStopped(error))

    def _loop(self, core: EngineCore) -> None:
        num_received = 0
        while True:
            for message in self._messages(block=not core.has_work):
                if isinstance(message, SubmitRequest):
                    core.add(message)
                    num_received += 1
                elif isinstance(message, AbortRequest):
                    core.abort(message)
                else:
                    outputs = core.fail_all("draining", "The server is shutting down; the answer was cut short.")
                    self._deliver(StepReport(outputs, num_received))
                    return
            self.step_started = time.monotonic()
            outputs = core.step()  # also when an abort left nothing to do: its report takes the gauges to zero
            self.step_started, self.step_ended = None, time.monotonic()
            self._deliver(StepReport(outputs, num_received))

    def _messages(self, *, block: bool) -> Iterator[Message]:
        if block:
            yield self._inbox.get()
        while not self._inbox.empty():
            yield self._inbox.get()
