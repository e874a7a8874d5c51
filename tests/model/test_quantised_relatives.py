"""Quantised checkpoints of kinds that are retold as another: the model of the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import edit_config, load
from peer import saved
from relatives import KINDS

FP8 = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}


@pytest.mark.parametrize("kind", ["glm4", "ernie4_5_with_biases", "seed_oss", "granite4", "hyperclovax", "gemma"])
def test_a_folder_of_fp8_is_the_model_that_its_numbers_make(tmp_path: Path, kind: str) -> None:
    """As of Ministral 3: a scale for each linear, and one of its inputs, which is left out."""
    saved(tmp_path, **KINDS[kind])
    file, held, numbers = tmp_path / "model.safetensors", dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(file).items():
        held[name] = numbers[name] = tensor
        if tensor.dim() == 2 and name.startswith("model.layers."):
            scale = tensor.abs().max() / 448
            held[name] = (tensor / scale).to(torch.float8_e4m3fn)
            numbers[name] = held[name].float() * scale
            held |= {f"{name}_scale_inv": scale, name.removesuffix("weight") + "activation_scale": torch.ones(())}
    assert len(held) > len(numbers)
    save_file(numbers, file)
    wanted = load(tmp_path)
    save_file(held, file)
    edit_config(tmp_path, quantization_config=FP8)
    found = load(tmp_path)
    assert found.config == wanted.config
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-6, atol=0)
