"""Which models the compiled kernels serve, and with how many bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hamburger.engine.device.load import _kernels, resolve
from hamburger.engine.types.config import EngineArgs, KVCacheDtype, Quantization
from hamburger.model.assemble import assemble
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.cpu.backend import CpuBackend
from hamburger.model.cpu.library import load_kernels
from hamburger.model.execution import Execution
from hamburger.model.kernel_shapes import layers_fit
from small_models import CPU, grafted, random_tensors, trunk_config

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")


def test_bits_are_what_was_asked() -> None:
    config = ModelConfig(trunk=trunk_config(**WIDE))
    kernels = load_kernels()
    for bits, name in ((4, "int4"), (8, "int8"), (None, "int8")):
        model = assemble(
            config,
            random_tensors(config),
            dtype=torch.bfloat16,
            device=CPU,
            max_positions=64,
            execution=Execution(kernels=kernels, bits=bits),
        )
        assert model.quantization == name
        assert isinstance(model.backend, CpuBackend)


def test_the_kernels_weights_are_the_only_ones_that_are_kept() -> None:
    config = grafted(trunk_config(**WIDE))
    execution = Execution(kernels=load_kernels())
    steps = assemble(
        config, random_tensors(config), dtype=torch.bfloat16, device=CPU, max_positions=64, execution=execution
    )
    kept = [found for found in vars(steps.backend).values() if isinstance(found, nn.Module)]
    assert not kept


def asked_for(quantization: Quantization, dtype: str = "auto") -> EngineArgs:
    return EngineArgs(quantization=quantization, dtype=dtype)


def test_who_gets_the_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fits, unfit = ModelConfig(trunk=trunk_config(**WIDE)), ModelConfig(trunk=trunk_config())
    assert layers_fit(fits.trunk)
    assert not layers_fit(unfit.trunk)
    assert _kernels(asked_for("auto"), fits, torch.bfloat16, CPU) is not None
    assert _kernels(asked_for("auto"), fits, torch.float32, CPU) is not None  # what a CPU without bfloat16 gets
    assert _kernels(asked_for("int8", "float32"), fits, torch.float32, CPU) is not None
    for config, dtype, device in (
        (fits, torch.float16, CPU),
        (unfit, torch.bfloat16, CPU),
        (fits, torch.bfloat16, torch.device("meta")),
    ):
        assert _kernels(asked_for("auto"), config, dtype, device) is None
    # On a CPU it says what makes it slow.
    assert [record.getMessage().rpartition("none for ")[2] for record in caplog.records] == [
        "float16 on cpu.",
        "this model's shape (widths must be multiples of 32).",
    ]
    assert _kernels(asked_for("none"), fits, torch.bfloat16, CPU) is None
    assert _kernels(asked_for("auto", "float32"), fits, torch.float32, CPU) is None
    with pytest.raises(ConfigError, match=r"quantization is int4.*multiples of 32"):
        _kernels(asked_for("int4"), unfit, torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match=r"quantization is int8.*float16"):
        _kernels(asked_for("int8"), fits, torch.float16, CPU)
    monkeypatch.setattr("hamburger.engine.device.load.load_kernels", lambda: None)
    assert _kernels(asked_for("auto"), fits, torch.bfloat16, CPU) is None
    with pytest.raises(ConfigError, match="without a compiler"):
        _kernels(asked_for("int4"), fits, torch.bfloat16, CPU)


def test_the_cache_is_bfloat16_unless_somebody_asked_for_other_digits(tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(**WIDE))
    save_checkpoint(tmp_path, config, random_tensors(config))

    def kv_dtype(quantization: Quantization, dtype: str, asked: KVCacheDtype = "auto") -> torch.dtype:
        given: dict[str, Any] = {"quantization": quantization, "dtype": dtype, "kv_cache_dtype": asked}
        return resolve(EngineArgs(model=str(tmp_path), device="cpu", max_model_len=32, **given)).kv_dtype

    assert kv_dtype("auto", "auto") == torch.bfloat16  # also where states are float32
    assert kv_dtype("int8", "float32") == torch.float32
    assert kv_dtype("none", "float32") == torch.float32
    assert kv_dtype("auto", "bfloat16") == torch.bfloat16
    assert kv_dtype("none", "float32", "bfloat16") == torch.bfloat16
    assert kv_dtype("auto", "auto", "int8") == torch.int8
