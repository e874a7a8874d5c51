"""How much memory the KV pool may take. Linux's own limits are asked, so that a container's limit counts."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hamburger.engine.pool import pool_share


def pool_bytes(device: torch.device, kv_cache_memory: int | None, num_engines: int = 1) -> int:
    """Bytes for the KV pool: what the user set, or a share of what is free now (after the weights were loaded).

    num_engines: how many divide that share among them. On a GPU each has its part of the whole memory for weights and
    pool, so that it does not matter which of them came first, or comes again.
    """
    if kv_cache_memory is not None:
        return kv_cache_memory
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = pool_share("cuda", free)
        if num_engines > 1:
            part = pool_share("cuda", total) // num_engines - torch.cuda.memory_reserved(device)
            budget = max(0, min(budget, part))
        return budget
    # The pool of an engine that came before is not yet touched, so it still counts as free here: hence a part each.
    return pool_share("cpu", available_host_bytes()) // num_engines


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: the machine's available memory or its cgroup's, whichever is less."""
    available = _meminfo_available(root / "proc/meminfo")
    for folder, limit, used, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            left = int((root / folder / limit).read_text()) - int((root / folder / used).read_text())
        except (OSError, ValueError):  # no such cgroup version, or "max": no limit
            continue
        available = min(available, max(0, left + _stat(root / folder / "memory.stat", cache)))
    return available


def _stat(path: Path, name: str) -> int:
    """A row of memory.stat. Files that were read, the weights above all, count as used, but the kernel drops them."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _meminfo_available(path: Path) -> int:
    """MemAvailable; where there is no /proc (macOS) half of the physical memory."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kibibytes * 1024
