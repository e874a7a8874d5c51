"""The numbers of a step between host and device, each way in one transfer, such that neither waits for the other.

Up: Staging, and `upload` for a tensor of its own. Down: Download. On a CPU there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {torch.int64: np.int64, torch.float32: np.float32}
_BYTES = 2**18  # more than a decoding step of 64 rows needs; a step that needs more sends several pieces
_ALIGNMENT = 16  # bytes: what kernels like best


class Staging:
    """One step's numbers on their way to the device, written into pinned memory and sent at once: tensors on `device`
    whose values follow with `send`; until then they hold nothing."""

    def __init__(self, device: torch.device, num_bytes: int = _BYTES) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._pieces: list[tuple[Tensor, Tensor]] = []  # bytes on the host and on the device
        self._used = num_bytes  # of the last piece
        self.num_sent = 0  # transfers

    def put(self, values: Sequence[float] | np.ndarray, dtype: torch.dtype) -> Tensor:
        """int64 or float32, of the values' shape. An array of that dtype is not copied."""
        # A step makes some twenty of these; torch.tensor takes several times as long for a short list.
        given = torch.from_numpy(np.asarray(values, dtype=_NUMPY_DTYPES[dtype]))
        if self._device.type == "cpu":
            return given
        return self._take(given) if given.numel() else given.to(self._device)

    def _take(self, given: Tensor) -> Tensor:
        needed = -(-given.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._used + needed > self._num_bytes:
            size = max(needed, self._num_bytes)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._pieces.append((host, torch.empty(size, dtype=torch.uint8, device=self._device)))
            self._num_bytes, self._used = size, 0
        start, end = self._used, self._used + given.nbytes
        self._used += needed
        host, there = (piece[start:end].view(given.dtype).view(given.shape) for piece in self._pieces[-1])
        host.copy_(given)
        return there

    def send(self) -> None:
        """Start the transfer; what the device is given from here on comes behind it."""
        for number, (host, there) in enumerate(self._pieces, start=1):
            used = self._used if number == len(self._pieces) else len(host)
            there[:used].copy_(host[:used], non_blocking=True)
            self.num_sent += 1


def upload(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [len(values), *] on the device; a GPU fetches it in its own time, behind what it was given before.

    torch.tensor(values, device=...) would wait there until all of that is done.
    """
    if device.type == "cpu":
        return torch.tensor(values)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host, all in one transfer; making it waits for nothing."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: int64, or of a float type that float64 holds exactly; all on one device."""
        self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        if not tensors[0].is_cpu:
            self._begin()

    @torch.inference_mode()
    def _begin(self) -> None:
        packed = pack(self._tensors)
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._host.copy_(packed, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(packed.device))

    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        if self._done is None:
            return list(self._tensors)
        self._done.synchronize()
        with torch.inference_mode():
            return unpack(self._host, self._tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [n]: all numbers of these tensors, one after the other; a float as the bits of the same in float64."""
    return torch.cat(
        [t.flatten() if t.dtype == torch.int64 else t.double().flatten().view(torch.int64) for t in tensors]
    )


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was packed; like: tensors of its shapes and dtypes, in order."""
    parts = zip(packed.split([tensor.numel() for tensor in like]), like, strict=True)
    return [
        (part if of.dtype == torch.int64 else part.view(torch.float64).to(of.dtype)).view(of.shape)
        for part, of in parts
    ]
