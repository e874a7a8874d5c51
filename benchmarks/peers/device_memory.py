"""How much memory a worker's device has, and the KV pool that fits into it."""

from __future__ import annotations

LEAST_POOL = 1  # byte: the engine says what it would need


def free_bytes(device: str) -> int:
    """Of the device, now. "auto" is the CPU where there is no GPU."""
    import torch

    from hamburger.engine.device.memory import available_host_bytes

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return int(torch.cuda.mem_get_info(None if device == "auto" else torch.device(device))[0])
    return available_host_bytes()


def fitting_pool(asked: int, free: int, beside: int) -> int:
    """Bytes: what was asked for, or what is left of `free` without what the process takes beside its pool."""
    return max(LEAST_POOL, min(asked, free - beside))
