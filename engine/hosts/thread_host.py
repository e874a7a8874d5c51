"""ThreadHost: the engine's loop in a thread of this process, for tests and for whoever embeds the server."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from hamburger.engine.core.core import EngineCore
from hamburger.engine.hosts.engine_loop import Inbox, run_loop
from hamburger.engine.types.events import EngineReady, EngineStopped, Event, Message, Stop
from hamburger.engine.types.messages import EngineInfo

logger = logging.getLogger(__name__)

BuildCore = Callable[[], tuple[EngineCore, EngineInfo]]


class ThreadHost:
    """An EngineHost (host.py). The core, and torch, are built inside the thread by `build`."""

    def __init__(self, build: BuildCore, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: of the loop's reports, time.monotonic() seconds."""
        self._build = build
        self._clock = clock
        self._inbox: Inbox = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._is_woken = False
        # A daemon, so that an interpreter that exits without shutdown() does not wait for it.
        self._thread = threading.Thread(target=self._main, name="hamburger-engine", daemon=True)

    @property
    def pid(self) -> int:
        return os.getpid()

    def start(self, on_event: Callable[[Event], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def abandon(self) -> None:
        self._inbox.put(Stop())  # a thread cannot be ended: it does so once the core is built

    async def join(self) -> None:
        self._thread.join()

    def _main(self) -> None:
        error: BaseException | None = None
        core: EngineCore | None = None
        try:
            core, info = self._build()
            self._deliver(EngineReady(info, core.config))
            run_loop(core, self._inbox, self._deliver, self._clock)
        except BaseException as caught:  # the thread's one boundary: whatever it is, who waits must hear of it
            if core is not None:  # what building raises, launch raises: its caller reports it
                logger.exception("The engine stopped on an error.")
            error = caught
        self._deliver(EngineStopped(error))

    def _deliver(self, event: Event) -> None:
        """(engine thread) Hand an event to the event loop; if that is closed, nobody is left to hear it."""
        self._events.append(event)
        if not self._is_woken:
            # One wake-up at a time: asyncio empties its wake-up pipe in a loop, and a byte for each step of a fast
            # engine would keep it in there.
            self._is_woken = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_wake)

    def _on_wake(self) -> None:
        self._is_woken = False  # first, so that what is appended from here on wakes again
        for _ in range(len(self._events)):
            self._loop.call_soon(self._on_event, self._events.popleft())  # an observer that fails harms one alone
