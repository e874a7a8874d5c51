"""What runs attention and everything else between the matrices: torch's own operations, or the Triton kernels, with or
without FlashInfer for the prompts' part of a step.

torch is the plain reference and the path on CPU. Triton compiles its kernels on the machine that runs them, so it needs
a C compiler and Python's headers there. FlashInfer compiles its own with nvcc, or brings them along.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from hamburger.model.config import ConfigError, TrunkConfig

if TYPE_CHECKING:
    from hamburger.model.gpu.chunks import ChunkAttention

Backend = Literal["torch", "triton", "flashinfer"]

_COMPILERS = ("cc", "gcc", "clang")
_CAPABILITY = (8, 0)  # Ampere: the first to multiply bfloat16
_HEAD_DIMS = (64, 128, 256)  # that FlashInfer ships kernels for, and tests
_CUDA = Path("/usr/local/cuda")  # where FlashInfer looks for nvcc at last


def choose_backend(name: str, device: torch.device) -> Backend:
    """`auto` is triton where its kernels can run on `device`, else torch. Raises ConfigError.

    What else speaks for flashinfer or against it is known with the model (chunk_race.py).
    """
    if name not in ("auto", "torch", "triton", "flashinfer"):
        raise ConfigError(f"attention_backend is {name!r}: use auto, torch, triton or flashinfer.")
    if name == "torch":
        return "torch"
    reason = why_no_triton(device)
    if reason is None and name == "flashinfer":
        reason = why_not_installed()
        if reason is None:
            return "flashinfer"
        raise ConfigError(f"attention_backend is flashinfer, but {reason}: use auto or triton.")
    if reason is None:
        return "triton"
    if name != "auto":
        raise ConfigError(f"attention_backend is {name}, but {reason}: use auto or torch.")
    return "torch"


def why_no_triton(device: torch.device) -> str | None:
    """What keeps the Triton kernels from running on `device`; None where nothing does."""
    if device.type != "cuda":
        return f"the device is {device}"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is not an NVIDIA GPU of compute capability 8.0 or more"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if "CC" not in os.environ and not any(shutil.which(name) for name in _COMPILERS):
        return "there is no C compiler, which Triton needs (for example the package gcc, or its path in CC)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's C headers, which Triton needs, are missing (for example the package python3-dev)"
    return None


def why_not_installed() -> str | None:
    """What FlashInfer lacks on this machine; None where nothing."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if find_spec("flashinfer_jit_cache") is None and not _has_nvcc():
        return "there is neither nvcc, which FlashInfer compiles with, nor the package flashinfer-jit-cache"
    return None


def why_unsuited(trunk: TrunkConfig, dtype: torch.dtype) -> str | None:
    """What FlashInfer's kernels do not take of a model; None where they take it."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype is {str(dtype).removeprefix('torch.')}, and FlashInfer takes bfloat16 and float16"
    if trunk.head_dim not in _HEAD_DIMS:
        return f"the model's head_dim is {trunk.head_dim}, and FlashInfer takes {', '.join(map(str, _HEAD_DIMS))}"
    return None


def chunk_attention_of(
    backend: Backend, trunk: TrunkConfig, dtype: torch.dtype, device: torch.device
) -> ChunkAttention:
    """What a backend other than torch attends prompts' chunks with. trunk: its sizes in this process."""
    if backend == "flashinfer":
        from hamburger.model.flashinfer_attention import FlashInferChunks

        return FlashInferChunks(trunk, dtype, device)
    from hamburger.model.gpu.attention import TritonChunks

    return TritonChunks(trunk, dtype)


def _has_nvcc() -> bool:
    """Where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return Path(home, "bin", "nvcc").exists()
    return shutil.which("nvcc") is not None or Path(_CUDA, "bin", "nvcc").exists()
