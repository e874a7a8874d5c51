"""What processes take of the machine, as far as the system says: memory and time of processors."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

_TRIM_SECONDS = 30.0


def resident_bytes(pid: int | None = None) -> int:
    """Of a process, this one for None; 0 for one that is not there, and where the system does not say."""
    try:
        pages = Path(f"/proc/{pid or 'self'}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back() -> bool:
    """What was freed and is held for later. False where the C library cannot; only glibc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return trim is not None


def keep_giving_back() -> None:
    """Have the allocator return, now and then, what it keeps of freed memory: 400 MB after an engine has loaded, later
    the pieces that steps, bodies and answers of all sizes leave. It takes milliseconds of a thread of its own."""

    def work() -> None:
        while give_back():
            time.sleep(_TRIM_SECONDS)

    threading.Thread(target=work, name="hamburger-memory", daemon=True).start()


def cpu_seconds(pid: int) -> float:
    """What a process has used of processors; the clock's seconds where the system does not say. Raises OSError for one
    that is not there."""
    if not Path("/proc/self/stat").is_file():
        return time.monotonic()
    behind_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(behind_name[11]) + int(behind_name[12])) / os.sysconf("SC_CLK_TCK")
