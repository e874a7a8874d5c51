"""What this process holds of the machine's memory, as far as the system says."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back() -> bool:
    """What was freed and is held for later. False where the C library cannot; only glibc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return trim is not None
