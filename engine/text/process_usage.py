"""What processes take of the machine, as far as the system says: memory and time of processors."""

from __future__ import annotations

import ctypes
import os
import time
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


def cpu_seconds(pid: int) -> float:
    """What a process has used of processors; the clock's seconds where the system does not say. Raises OSError for one
    that is not there."""
    if not Path("/proc/self/stat").is_file():
        return time.monotonic()
    behind_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(behind_name[11]) + int(behind_name[12])) / os.sysconf("SC_CLK_TCK")
