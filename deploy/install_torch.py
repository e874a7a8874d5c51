"""Puts torch into the environment of the interpreter that runs this: the GPU build where an NVIDIA GPU is, else the
CPU build. Standard library only; `make` runs it before anything else is installed.

An index serves several builds under one version, and pip alone takes gigabytes of CUDA libraries onto a machine that
cannot use them. So pip gets constraints that only the wanted build can meet: it settles them before it downloads any
CUDA library (on torch's metadata alone, where the index serves that), and takes the right build where there are both.

Environment:
    TORCH_INDEX  address of a package index to take torch from, whatever build it serves; unset: pip's own
    TORCH_CUDA   1: the CUDA build, 0: the CPU build, on any machine; unset: what nvidia-smi says
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

VERSION = "2.13.0"
REQUIREMENT = f"torch=={VERSION}"
# No version satisfies `<0`, so a build that needs any of these is out.
NO_CUDA = ("triton<0", "cuda-toolkit<0", "cuda-bindings<0", "nvidia-cudnn-cu12<0", "nvidia-cudnn-cu13<0")
NO_CPU = (f"torch!={VERSION}+cpu",)

ONLY_CUDA = f"""
This machine has no NVIDIA GPU, but the package index offers {REQUIREMENT} only as the CUDA build: gigabytes that it
cannot use. Nothing of it was installed. Either
  - name an index that has the CPU build; PyTorch's own CPU wheel index is shown by the selector on pytorch.org:
      TORCH_INDEX=<its address> make serve
  - or take the CUDA build all the same:
      TORCH_CUDA=1 make serve
"""
ONLY_CPU = f"""
This machine has an NVIDIA GPU, but the package index offers no CUDA build of {REQUIREMENT}. Either
  - name an index that has one; PyTorch's own wheel indexes are shown by the selector on pytorch.org:
      TORCH_INDEX=<its address> make serve
  - or run on the CPU all the same:
      TORCH_CUDA=0 make serve
"""


class SettingError(ValueError):
    """An environment variable has a value that means nothing; the message names both."""


def wants_cuda(env: Mapping[str, str], has_gpu: Callable[[], bool]) -> bool | None:
    """True: only a CUDA build will do, False: only one without CUDA, None: the named index decides."""
    choice = env.get("TORCH_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SettingError(f"TORCH_CUDA is {choice!r}: it must be 1 (CUDA build), 0 (CPU build) or unset.")
    if choice:
        return choice == "1"
    return None if env.get("TORCH_INDEX") else has_gpu()


def constraints(cuda: bool | None) -> tuple[str, ...]:
    """The lines that leave only the wanted build."""
    return () if cuda is None else NO_CPU if cuda else NO_CUDA


def pip_arguments(index: str | None, constraint_files: list[str]) -> list[list[str]]:
    """Arguments of the pip calls to make, in order.

    A named index gives torch itself; torch's own requirements may lie there or in pip's usual index.
    """
    install = ["install", *(part for name in constraint_files for part in ("--constraint", name))]
    if not index:
        return [[*install, REQUIREMENT]]
    return [
        [*install, "--index-url", index, "--no-deps", REQUIREMENT],
        [*install, "--extra-index-url", index, REQUIREMENT],
    ]


def explain(cuda: bool | None, pip_log: str) -> str | None:
    """What to tell the user when pip failed because the wanted build is not on offer; None for any other failure.

    pip_log is what pip's --log wrote: it names every package that pip came to look at.
    """
    if cuda is False and any(line.partition("<")[0] in pip_log for line in NO_CUDA):
        return ONLY_CUDA
    if cuda is True and any(f"torch-{VERSION}{plus}cpu" in pip_log for plus in ("+", "%2B", "%2b")):
        return ONLY_CPU
    return None


def installed_version() -> str | None:
    """The version of torch in this environment, or None."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def has_nvidia_gpu() -> bool:
    """Whether nvidia-smi is there and lists a GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listing.returncode == 0 and "GPU" in listing.stdout


def main(env: Mapping[str, str], project: Path) -> int:
    """Install torch unless this environment has it; returns an exit status."""
    present = installed_version()
    if present is not None and present.partition("+")[0] == VERSION:
        print(f"torch {present} is installed")
        return 0
    try:
        cuda = wants_cuda(env, has_nvidia_gpu)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        build, log = Path(folder) / "build.txt", Path(folder) / "pip.log"
        build.write_text("".join(f"{line}\n" for line in constraints(cuda)))
        for arguments in pip_arguments(env.get("TORCH_INDEX"), [str(project / "constraints.txt"), str(build)]):
            status = subprocess.run([sys.executable, "-m", "pip", "--log", str(log), *arguments]).returncode
            if status:
                print(explain(cuda, log.read_text()) or "pip failed: its last lines above say why.", file=sys.stderr)
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ, Path(__file__).resolve().parent.parent))
