"""Ranks: the processes beside an engine whose model is split (tensor parallelism), from rank 0's side. No torch.

    engine process = rank 0: scheduler, sampling          rank 1, 2, ... (rank.py): a part of the model each
       Ranks ◄──── a socket pair each: what to build, then the shape of each step ────►
       model/parallel/collectives.py ◄──── tensors, within a step: gloo or NCCL ────►

The shape goes over the socket because a rank that waits there waits in no collective, however long the engine has
nothing to do, and because its end tells each side at once of the other's death, also in the middle of a step.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from hamburger.engine.core.batch import BatchResult, Runner, ScheduledBatch
from hamburger.engine.logs import log_options
from hamburger.engine.transport.engine_process import describe_exit_code
from hamburger.engine.transport.wire import (
    Encoder,
    Failed,
    RankArgs,
    RankLoaded,
    RankMeet,
    RankMemory,
    RankPool,
    WireError,
    frames,
)
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import EngineDead, OutOfMemory
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ConfigError
from hamburger.model.parallel.step_shape import StepShape

OnLost = Callable[[Failed], None]
_Result = TypeVar("_Result")
_END_SECONDS = 5.0  # for a process that has sent its final message, or whose end shows as another's error first


class Ranks:
    """Starts ranks 1 .. tensor_parallel_size - 1; they end with this object, and with this process.

    on_lost is called once, in a thread of its own, with the first rank's end that nobody asked for.
    """

    def __init__(self, args: EngineArgs, on_lost: OnLost) -> None:
        self._encoder = Encoder()
        self._watch = _RankWatch(on_lost)
        self._sockets: list[socket.socket] = []
        for rank in range(1, args.tensor_parallel_size):
            own_end, rank_end = socket.socketpair()
            self._sockets.append(own_end)
            rank_args = self._encoder.frame(RankArgs(args, rank))
            threading.Thread(
                target=_run_rank,
                args=(rank, own_end, rank_end, rank_args, self._watch),
                name=f"hamburger-rank-{rank}",
                daemon=True,
            ).start()
        self._finalizer = weakref.finalize(self, _close, self._sockets, self._watch)

    def loaded(self) -> None:
        """Wait until each has its part of the weights. Raises what kept one from it."""
        self._collect_answers()

    def memory(self) -> int:
        """Wait until each has sent its RankMemory; the least of them. Raises what kept one from it."""
        return min(answer.pool_bytes for answer in self._collect_answers() if isinstance(answer, RankMemory))

    def tell(self, value: RankMeet | RankPool | StepShape) -> None:
        """Each of them: the next thing to do."""
        frame = self._encoder.frame(value)
        for connection in self._sockets:
            connection.sendall(frame)

    def wait_for_loss(self, seconds: float) -> Failed | None:
        """The first rank's end; waits so long for one."""
        self._watch.has_lost.wait(seconds)
        return self._watch.first_loss

    def close(self) -> None:
        """End them all."""
        self._finalizer()

    def _collect_answers(self) -> list[RankLoaded | RankMemory]:
        """One of each rank, to the same question."""
        found = []
        for _ in self._sockets:
            answer = self._watch.answers.get()
            if isinstance(answer, Failed):
                self.close()
                raise _error_of(answer)
            found.append(answer)
        return found


class LeadingRunner:
    """A Runner (core.py) of a model that the ranks share. A step that ends early leaves them out of step: for good.

    One that memory does not hold ends on all of them (ParallelSteps), so the next may run.
    """

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner, self._ranks = runner, ranks
        self._broken_by: str | None = None

    def run(self, batch: ScheduledBatch) -> BatchResult:
        """As Runner. Raises EngineDead where a rank has ended."""
        return self.lead(lambda: self._runner.run(batch))

    def lead(self, compute: Callable[[], _Result]) -> _Result:
        """Whatever takes steps of the ranks, which are told of them. Raises as `run`."""
        if self._broken_by is not None:
            raise EngineDead(self._broken_by)
        try:
            result = compute()
        except OutOfMemory as error:
            self._end_where_lost(error)
            raise
        except BaseException as error:
            self._broken_by = "a step of its ranks was broken off, so it cannot go on: build it anew."
            # A dead rank shows as an error of the collective first; who died says more.
            self._end(
                self._ranks.wait_for_loss(_END_SECONDS) if isinstance(error, (RuntimeError, OSError)) else None, error
            )
            raise
        self._end_where_lost(None)
        return result

    def _end_where_lost(self, error: OutOfMemory | None) -> None:
        """The calls of a group that was aborted may end without an error, with anything in their tensors."""
        if (lost := self._ranks.wait_for_loss(0)) is not None:
            self._end(lost, error)

    def _end(self, lost: Failed | None, error: BaseException | None) -> None:
        self._ranks.close()
        if lost is not None:
            self._broken_by = lost.message
            raise EngineDead(lost.message) from error


class _RankWatch:
    """What the ranks' threads have seen. It knows nothing of Ranks, whose end is to end them."""

    def __init__(self, on_lost: OnLost) -> None:
        self.answers: queue.SimpleQueue[RankLoaded | RankMemory | Failed] = queue.SimpleQueue()
        self.has_lost = threading.Event()
        self.first_loss: Failed | None = None
        self.closing = False
        self._on_lost = on_lost
        self._lock = threading.Lock()

    def report_loss(self, failed: Failed) -> None:
        with self._lock:
            if self.closing or self.first_loss is not None:
                return
            self.first_loss = failed
        self.has_lost.set()
        self.answers.put(failed)
        self._on_lost(failed)

    def close(self) -> None:
        with self._lock:
            self.closing = True


def _run_rank(rank: int, own_end: socket.socket, rank_end: socket.socket, rank_args: bytes, watch: _RankWatch) -> None:
    """One rank's life, in a thread of its own: on Linux a process ends with the thread that started it, too."""
    last: Failed | None = None
    try:
        with rank_end:
            # -P: the folder that one serves in is no place to import from.
            command = [sys.executable, "-P", "-m", "hamburger.engine.ranks.rank", str(rank_end.fileno())]
            command += log_options()
            process = subprocess.Popen(command, pass_fds=[rank_end.fileno()], stdin=subprocess.DEVNULL)
    except OSError as error:
        watch.report_loss(Failed("error", f"rank {rank} could not be started: {error}"))
        return
    with contextlib.suppress(OSError, WireError):
        own_end.sendall(rank_args)
        for value in frames(own_end):
            if isinstance(value, (RankLoaded, RankMemory)):
                watch.answers.put(value)
            elif isinstance(value, Failed):
                last = value
    try:
        code = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:  # its end of the socket is closed, and it lives on
        process.kill()
        code = process.wait()
    if last is None:
        last = Failed("error", f"rank {rank}, its process {process.pid}, {describe_exit_code(code)}")
    watch.report_loss(last)


def _close(sockets: list[socket.socket], watch: _RankWatch) -> None:
    watch.close()
    for connection in sockets:
        with contextlib.suppress(OSError):  # it has gone already
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def _error_of(failed: Failed) -> Exception:
    match failed.kind:
        case "config":
            return ConfigError(failed.message)
        case "checkpoint":
            return CheckpointError(failed.message)
    return EngineDead(failed.message)
