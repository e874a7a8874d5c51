"""EngineHost: where the engine's loop runs, as AsyncEngine sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from hamburger.engine.types.events import EngineReady, EngineStopped, Event, Message


class EngineHost(Protocol):
    """Where the engine's loop runs: ThreadHost or ProcessHost."""

    @property
    def pid(self) -> int:
        """Of the process that it runs in, once it was started."""

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Begin; `on_event` is called on the running event loop: EngineReady once, StepReport for each step,
        StepStarted before one that comes after a pause, and EngineStopped at the end, whatever ends it."""

    def send(self, message: Message) -> None:
        """Hand a message to the core before its next step. Never blocks; an engine that has stopped ignores it."""

    def abandon(self) -> None:
        """End without waiting for anything, as soon as that can be. Idempotent."""

    async def join(self) -> None:
        """Wait until nothing of it is left; call it once EngineStopped was delivered."""


class HostedEngine:
    """One engine on its host, from its start to its end. Both futures are set by whoever hears the host's events."""

    def __init__(self, host: EngineHost) -> None:
        loop = asyncio.get_running_loop()
        self.host = host
        self.ready: asyncio.Future[EngineReady] = loop.create_future()
        self.stopped: asyncio.Future[EngineStopped] = loop.create_future()
