"""ProcessHost: the engine's loop in a process of its own. No step holds up HTTP, and its death kills nothing else.

It imports no torch. The engine ends with this process, however that ends (engine/worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

from hamburger.engine.logs import LogFormat
from hamburger.engine.transport.cpu_placement import CpuPlacement
from hamburger.engine.transport.engine_process import describe_exit_code
from hamburger.engine.transport.wire import Decoder, Encoder, Ended, Failed, FrameBuffer, Progress, WireError
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import HamburgerError
from hamburger.engine.types.events import EngineStopped, Event, Message, StepReport
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ConfigError

logger = logging.getLogger(__name__)

BUILD_CORE = "hamburger.engine.build:build_core"
_RECEIVED_BYTES = 2**18  # at once, at most
_OF_SERVER = "HAMBURGER_"  # variables: keys among them, and an engine is told its settings in a message
_REAP_SECONDS = 2.0
_END_SECONDS = 5.0  # for a process that has sent its final message


class EngineProcessError(HamburgerError):
    """The engine's process failed or was ended; the message says by what."""


class Worker:
    """An engine's process from its start. It imports what it needs, which takes seconds, and waits for a ProcessHost.

    log_level and log_format are those of its stderr; builder: what builds the core there (engine/worker.py).
    connection: this side of its socket pair. As a context manager it is ended at the end, if it is still there. Raises
    OSError where no process can be started.
    """

    def __init__(self, builder: str = BUILD_CORE, log_level: str = "warning", log_format: LogFormat = "text") -> None:
        self.connection, worker_end = socket.socketpair()
        with worker_end:
            # -P: the folder that one serves in is no place to import from.
            command = [sys.executable, "-P", "-m", "hamburger.engine.worker", str(worker_end.fileno())]
            # A session of its own: what a terminal sends to this process's group is not meant for the engine.
            self.process = subprocess.Popen(
                [*command, builder, log_level, log_format],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith(_OF_SERVER)},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self.process.kill()  # does nothing to one that was waited for
        self.process.wait()


class ProcessHost:
    """An EngineHost (host.py). on_progress gets the lines that it reports while it is built.

    builder, log_level and log_format are those of its worker, which start() starts unless one is given. placement: one
    for all hosts of this process.
    """

    def __init__(
        self,
        args: EngineArgs,
        on_progress: Callable[[str], None] = lambda line: None,
        builder: str = BUILD_CORE,
        log_level: str = "warning",
        log_format: LogFormat = "text",
        worker: Worker | None = None,
        placement: CpuPlacement | None = None,
    ) -> None:
        self._args, self._on_progress = args, on_progress
        self._start_worker = partial(Worker, builder, log_level, log_format)
        self._worker, self._placement = worker, placement or CpuPlacement()
        self._encoder, self._decoder = Encoder(), Decoder()
        self._arrived = bytearray(_RECEIVED_BYTES)  # kept: to allocate as much for each report takes longer than it
        self._final_message: Failed | Ended | None = None
        self._is_abandoned = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._placement.go_everywhere()
        worker = self._worker or self._start_worker()
        self._process = worker.process
        self._outgoing = Outgoing(worker.connection)
        self._outgoing.send(self._encoder.frame(self._args))
        self._reading = asyncio.create_task(self._read(worker.connection), name="hamburger-engine")

    def send(self, message: Message) -> None:
        self._outgoing.send(self._encoder.frame(message))

    def dump_stacks(self) -> None:
        """Have the engine, and its ranks, write the stacks of their threads to stderr, whatever they are doing."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGUSR1)

    def abandon(self) -> None:
        if self._process.poll() is None:
            self._is_abandoned = True
            self._process.kill()

    async def join(self) -> None:
        await self._reading

    async def _read(self, connection: socket.socket) -> None:
        # Not by a transport: one that fails to write, or whose other side left something unread, forgets what has
        # arrived, and with it an engine's final message.
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        # Neither by a task: each step's report would wait for three rounds of the event loop.
        loop.add_reader(connection, self._receive, connection, FrameBuffer(), ended)
        try:
            await ended
        finally:
            loop.remove_reader(connection)
            self._outgoing.end()
            connection.close()
            self._placement.forget(self.pid)
            stopped = EngineStopped(await self._error())
            loop.call_soon(self._on_event, stopped)

    def _receive(self, connection: socket.socket, received: FrameBuffer, ended: asyncio.Future[None]) -> None:
        """Handle what has arrived, until the final message or the connection's end; an engine that has sent its final
        message may not manage to exit."""
        try:
            number = connection.recv_into(self._arrived)
            for body in received.frames(memoryview(self._arrived)[:number]):
                if self._final_message is None:
                    self._handle(self._decoder.value(body))
            if number and self._final_message is None:
                return
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        except WireError as error:  # nothing can be asked of it any more
            self._final_message = Failed("error", f"its process sent what cannot be read: {error}")
            self.abandon()
        asyncio.get_running_loop().remove_reader(connection)
        if not ended.done():
            ended.set_result(None)

    def _handle(self, value: Any) -> None:
        if isinstance(value, (Failed, Ended)):
            self._final_message = value
            return
        try:
            if isinstance(value, Progress):
                self._on_progress(value.line)
                return
            if isinstance(value, StepReport):
                self._placement.follow(self.pid)
            self._on_event(value)
        except Exception:  # what comes after it is to be heard; nor may it seem to be the connection's end
            logger.exception("What the engine told was not taken.")

    async def _error(self) -> BaseException | None:
        """What ended the engine; waits until its process is gone."""
        # Not by a thread of the loop's: others may keep all of them busy.
        waiting = ThreadPoolExecutor(1, "hamburger-engine-end")
        try:
            code = await asyncio.get_running_loop().run_in_executor(waiting, self._wait)
        finally:
            waiting.shutdown(wait=False)
        match self._final_message:
            case Ended():
                return None
            case Failed("config", message):
                return ConfigError(message)
            case Failed("checkpoint", message):
                return CheckpointError(message)
            case Failed(_, message):
                return EngineProcessError(message)
        if self._is_abandoned:
            return EngineProcessError("it did not stop in time, and was ended")
        return EngineProcessError(f"its process {self._process.pid} {describe_exit_code(code)}")

    def _wait(self) -> int:
        """The process's exit code, once it and its ranks are gone."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its end and lives on
            self._process.kill()
            code = self._process.wait()
        _reap(self._process.pid)
        return code


def _reap(group: int) -> None:
    """Wait a little for the other processes of an engine's group, its ranks: they are this process's to wait for once
    the engine is gone, where this is process 1 of a container."""
    until = time.monotonic() + _REAP_SECONDS
    with contextlib.suppress(ChildProcessError):  # there are none, or no more
        while time.monotonic() < until:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:  # they still run
                time.sleep(0.05)


class Outgoing:
    """Frames for the other side of a connection, in order: each leaves in the call that sends it, as far as there is
    room. What is sent when the other side is gone is for nobody."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection, self._waiting = connection, bytearray()

    def send(self, frame: bytes) -> None:
        if self._waiting:
            self._waiting += frame
        elif rest := frame[self._sent(frame) :]:
            self._waiting += rest
            asyncio.get_running_loop().add_writer(self._connection, self._go_on)

    def end(self) -> None:
        """Send no more of what waits."""
        self._waiting.clear()
        asyncio.get_running_loop().remove_writer(self._connection)

    def _go_on(self) -> None:
        del self._waiting[: self._sent(self._waiting)]
        if not self._waiting:
            self.end()

    def _sent(self, data: bytes | bytearray) -> int:
        """How many bytes of it there was room for; all where nobody is there any more."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)
