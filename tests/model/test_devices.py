"""Which device and dtype a name stands for."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from hamburger.model.config import ConfigError
from hamburger.model.device.devices import choose_device, choose_dtype
from small_models import CPU

CUDA = torch.device("cuda")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "hip", None)
    return monkeypatch


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_is_named() -> None:
    assert [str(choose_device(name)) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
    with pytest.raises(ConfigError, match="device is 'cuda:2', but torch sees GPUs up to cuda:1 here"):
        choose_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "mps", "meta"])
def test_other_devices_are_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{name}': use auto, cpu, cuda or cuda:N"):
        choose_device(name)


def test_without_a_gpu_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    for error, told in (
        (AssertionError("Torch not compiled with CUDA enabled"), "Torch not compiled with CUDA enabled"),
        (RuntimeError("The NVIDIA driver on your system is too old.\nMore of it."), "The NVIDIA driver .* is too old"),
    ):
        monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
        with pytest.raises(ConfigError, match=rf"'cuda', but torch has no CUDA here \({told}\): use cpu\.$"):
            choose_device("cuda")


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_auto_is_bfloat16_where_the_gpu_multiplies_it(
    two_gpus: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    two_gpus.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype("auto", CUDA) == dtype
    assert choose_dtype("float16", CUDA) == torch.float16


def test_float16_is_for_gpus() -> None:
    with pytest.raises(ConfigError, match="float16 needs a GPU"):
        choose_dtype("float16", CPU)
    with pytest.raises(ConfigError, match="dtype is 'int4': use auto, bfloat16, float32, float16"):
        choose_dtype("int4", CPU)
