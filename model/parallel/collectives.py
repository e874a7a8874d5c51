"""Collectives: how the ranks of one engine talk while they compute. Gloo on CPU, NCCL on GPUs.

It is an object of its own, not torch.distributed's default group, which may be the caller's. Everything is on the
loopback interface: the store that the ranks meet at listens on 127.0.0.1, and so do gloo and NCCL.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # its star imports hide them

_LOOPBACK = "127.0.0.1"
_MEET = timedelta(minutes=2)
# A dead rank is heard of otherwise (engine/ranks/ranks.py), and one that hangs shows in the engine's health.
_WAIT = timedelta(hours=1)


class CollectiveError(ConnectionError):
    """A call of the group failed. The ranks are out of step then, for good."""


class _Collectives(Protocol):
    """What is used of torch's process groups, which declare it nowhere."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: dist.GatherOptions) -> dist.Work: ...
    def broadcast(self, tensor: Tensor, root: int) -> dist.Work: ...
    def abort(self) -> None: ...


class Collectives:
    """Rank `rank` of `size`. Every rank makes the same calls in the same order, with contiguous tensors of like shape.

    The calls raise CollectiveError, whatever it was that failed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._ranks: _Collectives | None = None

    def host(self, device: torch.device, listener: socket.socket) -> None:
        """Rank 0: meet the others, who connect to the port of `listener`, a socket bound to 127.0.0.1."""
        port = listener.getsockname()[1]
        # It takes the descriptor over.
        store = TCPStore(
            _LOOPBACK, port, self.size, True, _MEET, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._connect(device, store)

    def join(self, device: torch.device, port: int) -> None:
        """The other ranks: meet at rank 0's port."""
        self._connect(device, TCPStore(_LOOPBACK, port, self.size, False, _MEET))

    def _connect(self, device: torch.device, store: Store) -> None:
        if device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _WAIT
            self._ranks = cast(_Collectives, dist.ProcessGroupNCCL(store, self.rank, self.size, nccl))
            return
        gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch 2.11 has this name only
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        gloo._timeout = _WAIT
        self._ranks = cast(_Collectives, dist.ProcessGroupGloo(store, self.rank, self.size, gloo))

    def abort(self) -> None:
        """Have whoever waits in a call fail; from any thread."""
        if self._ranks is not None:
            self._ranks.abort()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which is overwritten."""
        with _errors():
            self._connected.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor, parts: list[Tensor]) -> None:
        """All ranks' x, into rank 0's parts, one of x's shape for each rank. The others have none."""
        options = dist.GatherOptions()
        options.rootRank = 0
        with _errors():
            self._connected.gather([parts] if parts else [], [x], options).wait()

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, into every rank's."""
        with _errors():
            self._connected.broadcast(x, 0).wait()
        return x

    @property
    def _connected(self) -> _Collectives:
        if self._ranks is None:
            raise RuntimeError("the ranks have not met yet: call host or join first.")
        return self._ranks


@contextmanager
def _errors() -> Iterator[None]:
    """Also an error that says there is no memory: nobody knows which ranks made that call."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"a call of the ranks' group failed: {error}") from error
