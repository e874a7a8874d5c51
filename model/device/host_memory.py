"""Large pieces of host memory, in large pages where the system has them.

A page of 4 KiB costs a step a walk through page tables for every few slots or weights that it reads, and stops the
processor's prefetching; one of 2 MiB hardly ever does. Linux gives them to whoever asks.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a line of a processor's cache
_PIECE = 16 << 20  # bytes: of an arena


def zeroed(num_bytes: int, *, large_pages: bool = True) -> Tensor:
    """uint8 [num_bytes], zeros that take memory only as they are written. Raises MemoryError.

    large_pages: not worth their size where little is written in many places.
    """
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory cannot be had: {error.strerror}") from error
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


class Arena:
    """Hands out many pieces, which lie in a few large ones and live on as long as any of these is used."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeros."""
        if num_bytes > len(self._free):
            self._free = zeroed(max(num_bytes, _PIECE))
        taken, self._free = self._free[:num_bytes], self._free[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken
