"""How work on static tensors becomes replayable: as CUDA graphs, or not at all (it is then simply done again)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]


class Capture(Protocol):
    """Makes work replayable that reads and writes tensors of fixed addresses and never waits for the device."""

    def warm(self, work: Work) -> None:
        """Do it once before it is captured, so that libraries and kernels are ready."""

    def __call__(self, work: Work) -> Work:
        """What does the work again. Doing it for the first time is still to come."""


class EagerCapture:
    """Replaying is calling: the same static tensors without a graph, for CPUs and for finding a graph's faults."""

    def warm(self, work: Work) -> None:
        work()

    def __call__(self, work: Work) -> Work:
        return work


class CudaCapture:
    """CUDA graphs with one memory pool.

    They share it, so they may be replayed only one after the other, those of a step in the order of their capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def warm(self, work: Work) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        # What it took lies with the side stream, where nothing else can use it.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # torch.cuda.graph() would collect Python's garbage and empty the cache each time, which takes most of the time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay
