"""What runs attention and everything else between the matrices: torch's own operations, or the Triton kernels.

torch is the plain reference and the path on CPU. Triton compiles its kernels on the machine that runs them, so it needs
a C compiler, Python's headers and a folder for its cache there.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from hamburger.model.config import ConfigError

AttentionBackend = Literal["torch", "triton"]

_COMPILERS = ("gcc", "clang")  # that Triton looks for where CC names none
_CAPABILITY = (8, 0)  # Ampere: the first to multiply bfloat16


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """`auto` is triton where its kernels can run on `device`, else torch. Raises ConfigError."""
    if name not in ("auto", "torch", "triton"):
        raise ConfigError(f"attention_backend is {name!r}: use auto, torch or triton.")
    if name == "torch":
        return "torch"
    reason = why_no_triton(device)
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
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in (_COMPILERS if named is None else (named,))):
        return "there is no C compiler, which Triton needs (for example the package gcc, or its path in CC)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's C headers, which Triton needs, are missing (for example the package python3-dev)"
    return _why_no_cache()


def _why_no_cache() -> str | None:
    """Triton writes libraries to its cache and loads them from there: where it cannot, no kernel starts."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111 - Path's own raises without a home
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute()
    place = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return f"Triton's cache {folder} cannot be written (TRITON_CACHE_DIR names another folder)"
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        return f"Triton's cache {folder} lies on a noexec mount: nothing can be loaded from it (TRITON_CACHE_DIR)"
    return None
