"""How much memory the KV pool may take. Linux's own limits are asked, so that a container's limit counts."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# A GPU is there for the server; a CPU machine's memory is shared with everything else on it.
_GPU_SHARE, _CPU_SHARE = 0.9, 0.4


def pool_bytes(device: torch.device, kv_cache_memory: int | None) -> int:
    """Bytes for the KV pool: what the user set, or a share of what is free now (after the weights were loaded)."""
    if kv_cache_memory is not None:
        return kv_cache_memory
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return int(available_host_bytes() * _CPU_SHARE)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: the machine's available memory or its cgroup's, whichever is less."""
    available = _meminfo_available(root / "proc/meminfo")
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((root / limit).read_text()) - int((root / used).read_text())
        except (OSError, ValueError):  # no such cgroup version, or "max": no limit
            continue
        available = min(available, max(0, left))
    return available


def _meminfo_available(path: Path) -> int:
    """MemAvailable; where there is no /proc (macOS) half of the physical memory."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kibibytes * 1024
