"""Staging: the numbers of one step on their way to the device, written into pinned memory and sent in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {torch.int64: np.int64, torch.float32: np.float32}
_BYTES = 2**18  # more than a decoding step of 64 rows needs; a step that needs more sends several pieces
_ALIGNMENT = 16  # bytes: what kernels like best


class Staging:
    """Tensors on `device` whose values follow with `send`; until then they hold nothing. For one step only."""

    def __init__(self, device: torch.device, num_bytes: int = _BYTES) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._pieces: list[tuple[Tensor, Tensor]] = []  # bytes on the host and on the device
        self._used = num_bytes  # of the last piece
        self.num_sent = 0  # transfers

    def put(self, values: Sequence[float] | np.ndarray, dtype: torch.dtype) -> Tensor:
        """int64 or float32 [len(values)]; an array has one dimension."""
        # A step makes some twenty of these; torch.tensor takes several times as long for a short list.
        given = torch.from_numpy(np.array(values, dtype=_NUMPY_DTYPES[dtype]))
        if self._device.type == "cpu":
            return given
        return self._take(given) if len(values) else given.to(self._device)

    def _take(self, given: Tensor) -> Tensor:
        needed = -(-given.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._used + needed > self._num_bytes:
            size = max(needed, self._num_bytes)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._pieces.append((host, torch.empty(size, dtype=torch.uint8, device=self._device)))
            self._num_bytes, self._used = size, 0
        start, end = self._used, self._used + given.nbytes
        self._used += needed
        host, there = (piece[start:end].view(given.dtype) for piece in self._pieces[-1])
        host.copy_(given)
        return there

    def send(self) -> None:
        """Start the transfer; what the device is given from here on comes behind it."""
        for number, (host, there) in enumerate(self._pieces, start=1):
            used = self._used if number == len(self._pieces) else len(host)
            there[:used].copy_(host[:used], non_blocking=True)
            self.num_sent += 1
