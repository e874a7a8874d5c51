"""Supervisor: the engine's process from the server's side. Starts it again when it died, and asks it why it hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.health import hang_fault
from hamburger.engine.hosts.process_host import EngineProcessError, ProcessHost, Worker
from hamburger.engine.logs import LogFormat
from hamburger.engine.transport.cpu_placement import CpuPlacement
from hamburger.engine.types.config import EngineArgs

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0  # between starts that fail


class Supervisor:
    """Holds the engine's host and the restarts that are left. on_progress gets lines for people.

    title: what the log calls the engine. worker: the first engine's process, where it was started before.
    placement: one for all engines of this process.
    """

    def __init__(
        self,
        args: EngineArgs,
        on_progress: Callable[[str], None],
        restarts: int,
        log_level: str = "warning",
        log_format: LogFormat = "text",
        title: str = "The engine",
        worker: Worker | None = None,
        placement: CpuPlacement | None = None,
    ) -> None:
        self._args, self._on_progress, self._restarts = args, on_progress, restarts
        self._log_level, self._log_format = log_level, log_format
        self._title, self._placement = title, placement or CpuPlacement()
        self.host = self._new_host(worker)

    async def keep_alive(self, engine: AsyncEngine) -> None:
        """Start the engine again whenever it dies, while restarts are left; returns when it is dead for good."""
        engine.starts_again = self._restarts > 0
        while (error := await engine.stopped()) is not None:
            logger.error("%s died: %s", self._title, error)
            if not self._restarts or engine.health().draining:
                return
            if not await self._start_again(engine):
                engine.starts_again = False
                return
            engine.starts_again = self._restarts > 0
            self._on_progress("the engine is ready again")
        await asyncio.Event().wait()  # it was asked to stop: there is nothing to keep alive

    async def _start_again(self, engine: AsyncEngine) -> bool:
        """Whether it came back. A process that was ended while it loaded, as by the kernel when memory is short, takes
        another restart; any other reason would be the same the next time."""
        pause = _PAUSE_SECONDS
        while True:
            self._restarts -= 1
            self._on_progress(f"starting it again; {self._restarts} restarts are left")
            self.host = self._new_host()
            try:
                await engine.restart(self.host)
                return True
            except Exception as failure:
                logger.error("%s could not be started again: %s", self._title, failure)
                if not isinstance(failure, EngineProcessError) or not self._restarts or engine.health().draining:
                    return False
            await asyncio.sleep(pause)
            if engine.health().draining:
                return False
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def watch_for_hangs(self, engine: AsyncEngine) -> None:
        """Have the engine write its stacks, once for each time that it hangs. Runs until it is cancelled."""
        was_hanging = False
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            fault = hang_fault(engine.health())
            if fault is not None and not was_hanging:
                logger.error("%s hangs: %s. The stacks of its threads follow.", self._title, fault)
                self.host.dump_stacks()
            was_hanging = fault is not None

    def _new_host(self, worker: Worker | None = None) -> ProcessHost:
        return ProcessHost(
            self._args,
            self._on_progress,
            log_level=self._log_level,
            log_format=self._log_format,
            worker=worker,
            placement=self._placement,
        )
