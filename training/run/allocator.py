"""Keeps memory that is freed on the CPU for the next tensor: the kernel would zero it anew, page by page."""

from __future__ import annotations

import ctypes
import platform

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER, _PAD_BYTES = 2**31 - 1, 256 * 2**20


def keep_freed_memory() -> bool:
    """Tell the C library's allocator to keep what is freed; False where it is not glibc's.

    It holds for the whole process, so it is for commands, not for libraries: a training step frees hundreds of
    megabytes and asks for the same again (docs/training.md has the figures). Not for work that keeps small tensors
    between large ones: the gaps between them could not be joined, and the process would grow.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _PAD_BYTES))
    return all(mallopt(name, value) == 1 for name, value in settings)
