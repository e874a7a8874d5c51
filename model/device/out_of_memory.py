"""Tells an error that means too little memory from all others."""

from __future__ import annotations

import torch

# What plain RuntimeErrors say where the host has no memory left, or a library or a kernel finds none on the GPU.
_TEXTS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def out_of_memory_reason(error: Exception) -> str | None:
    """Its first line where it means that a device has no memory left; None for any other error."""
    found = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    found |= isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    return str(error).split("\n")[0] if found else None


def release_cached_memory(device: torch.device) -> None:
    """Give what the allocator keeps back to the device. Call it when the error is gone, whose frames hold tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
