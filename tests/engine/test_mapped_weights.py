"""A checkpoint's file is mapped to be read: nothing that the kernels hold may keep it there, or it stays resident."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from checkpoints import save_hf
from hamburger.engine.build import build_core
from hamburger.engine.types.config import EngineArgs
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import load_kernels
from native_models import WIDE
from small_models import random_tensors, trunk_config

pytestmark = [
    pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_the_kernels_form_leave_their_file(tmp_path: Path, dtype: str) -> None:
    config = ModelConfig(trunk=trunk_config(architecture="qwen2", qkv_bias=True, **WIDE))
    folder = save_hf(tmp_path / "model", config, random_tensors(config))
    args = EngineArgs(
        model=str(folder), device="cpu", dtype=dtype, quantization="int8", max_model_len=64, kv_cache_memory=16 << 20
    )
    core, _ = build_core(args)
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert not core.has_work
