"""Who gets the Triton kernels, and that nothing else needs their package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hamburger.model.config import ConfigError
from hamburger.model.gpu import availability as backends
from hamburger.model.gpu.availability import choose_backend
from small_models import CPU

CUDA = torch.device("cuda")


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with all that Triton needs."""
    (tmp_path / "Python.h").touch()
    compiler = tmp_path / "some-compiler"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made" / "later"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return monkeypatch


def test_a_gpu_with_all_it_needs_takes_triton(fit: pytest.MonkeyPatch) -> None:
    assert choose_backend("auto", CUDA) == choose_backend("triton", CUDA) == "triton"
    assert choose_backend("torch", CUDA) == "torch"
    fit.delenv("CC")
    fit.setattr(shutil, "which", lambda name: "/bin/gcc" if name == "gcc" else None)
    assert choose_backend("auto", CUDA) == "triton"


@pytest.mark.parametrize("lacking", ["capability", "package", "compiler", "named compiler", "headers"])
def test_what_is_missing_is_named(lacking: str, fit: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if lacking == "capability":
        fit.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    elif lacking == "package":
        fit.setattr(backends, "find_spec", lambda name: None)
    elif lacking == "compiler":
        fit.delenv("CC")
        fit.setattr(shutil, "which", lambda name: "/usr/bin/cc" if name == "cc" else None)  # Triton looks for others
    elif lacking == "named compiler":
        fit.setenv("CC", f"{tmp_path}/some-compiler -pipe")  # Triton takes all of it for a path
    else:
        (tmp_path / "Python.h").unlink()
    said = {
        "capability": "Some GPU is not an NVIDIA GPU of compute capability 8.0",
        "package": "the package triton is not installed",
        "compiler": "no C compiler",
        "named compiler": "no C compiler",
        "headers": "Python's C headers",
    }
    with pytest.raises(ConfigError, match=f"^attention_backend is triton, but .*{said[lacking]}.*: use auto or torch"):
        choose_backend("triton", CUDA)
    assert choose_backend("auto", CUDA) == "torch"


def test_a_cache_that_cannot_be_written_or_loaded_from_is_named(fit: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where a container's root is read-only, or its /tmp is mounted as Docker mounts one."""
    access = os.access

    def read_only(path: str | Path, mode: int, **options: bool) -> bool:
        return access(path, mode, **options) and not (mode & os.W_OK and Path(path) == tmp_path)

    with fit.context() as patch:
        patch.setattr(os, "access", read_only)  # root may write wherever it wants
        with pytest.raises(ConfigError, match=r"Triton's cache \S+/made/later cannot be written \(TRITON_CACHE_DIR"):
            choose_backend("triton", CUDA)
        assert choose_backend("auto", CUDA) == "torch"
    with fit.context() as patch:
        patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
        with pytest.raises(ConfigError, match=r"Triton's cache \S+/made/later lies on a noexec mount"):
            choose_backend("triton", CUDA)
    fit.delenv("TRITON_CACHE_DIR")  # then it is in the home folder
    fit.setenv("HOME", str(tmp_path / "Python.h"))
    with pytest.raises(ConfigError, match=r"cache \S+/Python.h/.triton/cache cannot be written"):
        choose_backend("triton", CUDA)


def test_a_cpu_takes_torch() -> None:
    assert choose_backend("auto", CPU) == choose_backend("torch", CPU) == "torch"
    with pytest.raises(ConfigError, match="attention_backend is triton, but the device is cpu"):
        choose_backend("triton", CPU)
    with pytest.raises(ConfigError, match="attention_backend is 'flash'"):
        choose_backend("flash", CPU)


def test_an_engine_is_built_without_the_package() -> None:
    """None in sys.modules makes every import of it fail."""
    program = "import sys; sys.modules['triton'] = None; import hamburger.engine.build, hamburger.engine.worker"
    subprocess.run([sys.executable, "-c", program], check=True)
