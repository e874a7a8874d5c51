"""The device and dtype that a user names, or the best of this machine."""

from __future__ import annotations

import torch

from hamburger.model.config import ConfigError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ConfigError for a device that is unknown or not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}: use auto, cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}: use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch has no CUDA here ({_why_no_cuda()}): use cpu.")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"device is {name!r}, but torch sees GPUs up to cuda:{last} here: use one of those.")
    return device


def _why_no_cuda() -> str:
    """What torch says of it: its build, the driver, which may be too old, or the GPUs that it may see."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).split("\n")[0].rstrip(".")
    return "it sees no GPU"


def make_current(device: torch.device) -> None:
    """Triton launches on the thread's current GPU, and events are of its streams. `cuda` alone is the current one
    already, and torch.cuda.set_device raises for it."""
    if device.index is not None:
        torch.cuda.set_device(device)


def device_of_rank(name: str, rank: int, size: int) -> torch.device:
    """The device of one of `size` ranks: the CPU for all, or a GPU each. Raises ConfigError, as choose_device."""
    device = choose_device(name)
    if size == 1 or device.type == "cpu":
        return device
    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but torch sees {torch.cuda.device_count()} GPUs here: lower it."
        )
    return torch.device("cuda", rank)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it itself, else float32. Raises ConfigError."""
    if name == "auto":
        has_bf16 = _gpu_has_bf16(device) if device.type == "cuda" else _cpu_has_bf16()
        return torch.bfloat16 if has_bf16 else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}: use auto, {', '.join(_DTYPES)}.")
    if name == "float16" and device.type == "cpu":
        raise ConfigError("dtype float16 needs a GPU: use bfloat16 or float32 on CPU.")
    return _DTYPES[name]


def _gpu_has_bf16(device: torch.device) -> bool:
    """From Ampere on; AMD's GPUs, whose numbers mean others, all have it that torch supports."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; emulated, it would be slower than float32."""
    get = getattr(torch.cpu, "get_capabilities", None)
    if get is None:  # torch 2.11
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    capabilities = get()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
