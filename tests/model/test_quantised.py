"""Checkpoints whose weights are quantised are read as those that wrote them read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from checkpoints import Tensors, assert_equal, edit_config, load, save_hf
from hamburger.model.checkpoints.quantised.methods import Quantisation, parse_quantisation
from hamburger.model.checkpoints.quantised.weights import unquantised
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.cpu.weights import has_4_bits
from small_models import random_tensors, trunk_config
from trunk_shapes import QWEN3_MOE

# One linear in each layout, and its numbers, by AutoAWQ 0.2.9 (its own packing), GPTQModel 7.7.0 (its own packing; of
# the two zeros that are 0 its format keeps what a borrow leaves) and compressed-tensors 0.20.1.
LINEARS = Path(__file__).parents[1] / "data" / "quantised" / "linears.safetensors"
_COMPRESSED = Quantisation("compressed-tensors")
METHODS = {
    "awq": Quantisation("awq", bits=4),
    "gptq4": Quantisation("gptq", bits=4, plus_one=True),
    "gptq4act": Quantisation("gptq", bits=4, plus_one=True, reordered=True),
    "gptq4v2": Quantisation("gptq", bits=4),
    "gptq8": Quantisation("gptq", bits=8, plus_one=True),
    "gptq2": Quantisation("gptq", bits=2, plus_one=True),
    "pack4": _COMPRESSED,
    "pack4asym": _COMPRESSED,
    "pack4channel": _COMPRESSED,
    "pack8": _COMPRESSED,
    "int8": _COMPRESSED,
    "int8asym": _COMPRESSED,
    "fp8tensor": _COMPRESSED,
    "fp8channel": _COMPRESSED,
    "fp8block": Quantisation("compressed-tensors", block=(16, 16)),
}
TRUNK = trunk_config(hidden_size=64, intermediate_size=96, head_dim=32, num_heads=2, num_kv_heads=1)
MOE = trunk_config(**QWEN3_MOE, hidden_size=64, intermediate_size=96)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
INT4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": INT4}}


def parts_of(name: str) -> tuple[Tensors, Tensor]:
    """What a file holds of a linear, and its numbers."""
    found = {key: tensor for key, tensor in load_file(LINEARS).items() if key.startswith(f"{name}.")}
    return found, found.pop(f"{name}.expected")


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Codes of 4 bits [n, k] -> int32 [n, k / 8]; order: which of 8 is in which place, the lowest first."""
    eights = codes.to(torch.int64).unflatten(-1, (-1, 8))[..., order]
    found = (eights << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def quantised_folder(folder: Path, settings: dict[str, Any], trunk: TrunkConfig = TRUNK) -> tuple[Path, Tensors]:
    """A small model in the layout of AWQ or GPTQ, and its tensors as numbers."""
    numbers, held = random_tensors(ModelConfig(trunk=trunk)), Tensors()
    for name, tensor in numbers.items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        codes, zeros = torch.randint(0, 16, tensor.shape), torch.randint(1, 16, (len(tensor), tensor.shape[1] // 32))
        scales = (torch.rand(zeros.shape) / 100 + 0.001).half()
        numbers[name] = (codes - zeros.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
        linear = name.removesuffix(".weight")
        if settings["quant_method"] == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            weight, zero = words(codes.T, order), words(zeros.T, order)
        else:
            weight, zero = words(codes).T, words(zeros.T - 1)
        held |= {f"{linear}.qweight": weight, f"{linear}.qzeros": zero, f"{linear}.scales": scales.T}
    save_hf(folder, ModelConfig(trunk=trunk), {name: tensor.contiguous() for name, tensor in held.items()})
    edit_config(folder, quantization_config=settings)
    return folder, numbers


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("name", METHODS)
def test_a_linear_is_what_its_own_library_reads(name: str) -> None:
    parts, numbers = parts_of(name)
    rounding = {f"{name}.{part}": torch.ones(1) for part in ("input_scale", "k_scale", "kv_scale", "activation_scale")}
    assert_equal(dict(unquantised(METHODS[name], parts | rounding, torch.float32, "it")), {f"{name}.weight": numbers})


@pytest.mark.parametrize(("name", "has_four"), [("awq", True), ("gptq4", True), ("pack4", True), ("gptq4act", False)])
def test_weights_of_4_bits_are_kept_as_such_where_neighbours_share_a_scale(name: str, has_four: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert has_4_bits(parts_of(name)[1].to(dtype)) == has_four


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
)
def test_no_number_of_8_bits_is_taken_without_its_scale(dtype: torch.dtype) -> None:
    parts = {"it.weight": torch.tensor([[1.0, -0.5]]).to(dtype), "it.weight_scale": torch.tensor(3.0)}
    found = unquantised(_COMPRESSED, parts, torch.float32, "it")
    assert_equal(dict(found), {"it.weight": torch.tensor([[3.0, -1.5]])})


@pytest.mark.parametrize("name", ["pack4", "pack4asym"])
def test_inputs_may_say_their_group(name: str) -> None:
    """As compressed-tensors wrote it with `actorder: group`, until 2026."""
    parts, numbers = parts_of(name)
    order = torch.randperm(numbers.shape[1])
    found = parts[f"{name}.weight_packed"].view(torch.uint8)
    codes = torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)
    parts[f"{name}.weight_packed"] = words(codes[:, order])
    parts[f"{name}.weight_g_idx"] = (order // 32).to(torch.int32)
    assert_equal(dict(unquantised(_COMPRESSED, parts, torch.float32, "it")), {f"{name}.weight": numbers[:, order]})


def test_inputs_of_a_byte_each_may_say_their_group() -> None:
    codes, scale, order = torch.randint(-9, 9, (4, 8), dtype=torch.int8), torch.rand(4, 2), torch.randperm(8)
    parts = {"it.weight": codes, "it.weight_scale": scale, "it.weight_g_idx": order // 4}
    found = unquantised(_COMPRESSED, parts, torch.float32, "it")
    assert_equal(dict(found), {"it.weight": codes * scale[:, order // 4]})


@pytest.mark.parametrize(("settings", "trunk"), [(AWQ, TRUNK), (GPTQ, TRUNK), (AWQ, MOE)])
def test_a_folder_is_loaded_as_the_numbers_it_stands_for(
    tmp_path: Path, settings: dict[str, Any], trunk: TrunkConfig
) -> None:
    folder, numbers = quantised_folder(tmp_path / "small", settings, trunk)
    loaded = load(folder)
    assert loaded.config == ModelConfig(trunk=trunk)
    assert_equal(loaded.tensors, numbers)
    assert_equal(load(folder, torch.bfloat16).tensors, {name: tensor.bfloat16() for name, tensor in numbers.items()})


def test_a_folder_of_fp8_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    config = ModelConfig(trunk=TRUNK)
    held = Tensors()
    for name, tensor in random_tensors(config).items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        blocks = tensor.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))  # [rows, 32, columns, 32]
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        held[name] = (blocks / scale).view(tensor.shape).to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = scale[:, 0, :, 0]
    folder = save_hf(tmp_path / "small", config, held)
    edit_config(folder, quantization_config=FP8)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
    ).state_dict()
    ours = load(folder).tensors
    assert_equal(ours, {name: theirs[name] for name in ours})


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    """As of nvidia/Llama-3.1-8B-Instruct-FP8: config.json says nothing of it."""
    held, numbers = Tensors(), random_tensors(ModelConfig(trunk=TRUNK))
    for name, tensor in numbers.items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        linear, scale = name.removesuffix(".weight"), tensor.abs().max() / 448
        held[name] = (tensor / scale).to(torch.float8_e4m3fn)
        held[f"{linear}.weight_scale"], held[f"{linear}.input_scale"] = scale, torch.tensor(0.1)
        numbers[name] = held[name].float() * scale
    folder, beside = (
        save_hf(tmp_path / "small", ModelConfig(trunk=TRUNK), held),
        tmp_path / "small/hf_quant_config.json",
    )
    says = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.15.0"}, "quantization": says}))
    assert_equal(load(folder).tensors, numbers)
    for found, message in (({**says, "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"), ("FP8", "quantization is no")):
        beside.write_text(json.dumps({"quantization": found}))
        with pytest.raises(CheckpointError, match=f"hf_quant_config.json: .*{message}"):
            load(folder)


def test_biases_of_zeros_that_autogptq_wrote_are_left_out(tmp_path: Path) -> None:
    folder, numbers = quantised_folder(tmp_path / "small", GPTQ)
    bias = "model.layers.0.mlp.up_proj.bias"
    change_tensors(folder, lambda tensors: tensors.update({bias: torch.zeros(96)}))
    assert_equal(load(folder).tensors, numbers)
    change_tensors(folder, lambda tensors: tensors.update({bias: torch.ones(96)}))
    with pytest.raises(CheckpointError, match=f"unknown tensors: {bias}"):
        load(folder)


_LINEAR = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        ("scales", None, rf"{_LINEAR}\.scales, a part of a quantised weight, is missing"),
        ("qzeros", None, rf"{_LINEAR}\.qzeros, .* is missing"),
        (
            "scales",
            torch.ones(3, 96).half(),
            rf"{_LINEAR}: the parts of its quantised weight do not fit: 3 scales or zeros for 64 inputs or outputs",
        ),
        (
            "qweight",
            torch.zeros(64, 12),
            rf"{_LINEAR}: .*codes are words of int32 in two dimensions, not torch.float32 in 2",
        ),
        ("qweight", torch.zeros(32, 12, dtype=torch.int32), rf"misshaped tensors: {_LINEAR}.weight"),
        ("qzeros", torch.zeros(0, 12, dtype=torch.int32), rf"{_LINEAR}: the parts of its quantised weight do not fit"),
        ("qzeros", torch.zeros(0, 0, dtype=torch.int32), rf"{_LINEAR}: the parts of its quantised weight do not fit"),
        ("scales", torch.full((2, 96), torch.inf).half(), rf"{_LINEAR}.weight holds numbers that are not finite"),
    ],
)
def test_a_part_that_is_missing_or_wrong_is_named(tmp_path: Path, name: str, wrong: Tensor | None, match: str) -> None:
    folder, _ = quantised_folder(tmp_path / "small", AWQ)

    def change(tensors: Tensors) -> None:
        del tensors[f"{_LINEAR}.{name}"]
        if wrong is not None:
            tensors[f"{_LINEAR}.{name}"] = wrong

    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=match):
        load(folder)


def test_weights_of_another_method_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    folder, _ = quantised_folder(tmp_path / "small", AWQ)
    edit_config(folder, quantization_config=FP8)
    with pytest.raises(CheckpointError, match=r"fp8 has no qweight of torch\.int32"):
        load(folder)


def test_a_shape_that_is_none_is_named() -> None:
    parts, _ = parts_of("pack4")
    for wrong in (torch.tensor(5), torch.tensor([1.5, 2.0]), torch.tensor([1, 2, 3]), torch.tensor([0, 0])):
        with pytest.raises(CheckpointError, match="pack4: the parts of its quantised weight do not fit"):
            dict(unquantised(_COMPRESSED, parts | {"pack4.weight_shape": wrong}, torch.float32, "it"))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (AWQ, Quantisation("awq", bits=4)),
        (GPTQ, Quantisation("gptq", bits=4, plus_one=True)),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "desc_act": True}, Quantisation("gptq", bits=4, reordered=True)),
        ({**GPTQ, "format": "GPTQ_v2"}, Quantisation("gptq", bits=4)),
        ({**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}, Quantisation("gptq", bits=4, plus_one=True)),
        ({**AWQ, "version": "GEMM"}, Quantisation("awq", bits=4)),
        (FP8, Quantisation("fp8", block=(32, 32))),
        ({"quant_method": "fp8", "weight_block_size": None}, Quantisation("fp8")),
        ({"quant_method": "fp8"}, Quantisation("fp8", block=(128, 128))),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Quantisation("modelopt")),
        (PACKED, Quantisation("compressed-tensors", bits=4)),
        ({**PACKED, "sparsity_config": {"format": "dense"}}, Quantisation("compressed-tensors", bits=4)),
        (
            {**PACKED, "config_groups": {"a": INT4, "b": {"weights": {"num_bits": 8, "type": "int"}}}},
            Quantisation("compressed-tensors"),
        ),
        (
            {**PACKED, "config_groups": {"a": {"weights": {**INT4["weights"], "actorder": "group"}}}},
            Quantisation("compressed-tensors", bits=4, reordered=True),
        ),
        (
            {
                **PACKED,
                "format": "float-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "block_structure": [128, 64]}}},
            },
            Quantisation("compressed-tensors", block=(128, 64)),
        ),
        (None, None),
        ({}, None),
    ],
)
def test_a_configuration_says_how(settings: Any, found: Quantisation | None) -> None:
    assert parse_quantisation({"quantization_config": settings}, "it") == found


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ("awq", "quantization_config is no object"),
        (
            {"bits": 4},
            "quant_method None is not supported; supported are: fp8, compressed-tensors, gptq, awq, modelopt",
        ),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported.* name a checkpoint with unquantised"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ({**AWQ, "version": None, "format": "gemv"}, "format is 'gemv'; supported: gemm"),
        ({**AWQ, "bits": True}, "bits is True; supported: 4"),
        ({**GPTQ, "bits": 4.0}, "bits is 4.0; supported: 2, 4, 8"),
        ({**GPTQ, "bits": 3}, "bits is 3; supported: 2, 4, 8"),
        ({**GPTQ, "bits": [4]}, r"bits is \[4\]; supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "format": "gptq_p"}, "format is 'gptq_p'; supported: gptq, gptq_v2"),
        ({**GPTQ, "desc_act": "no"}, "desc_act is 'no': it must be true or false"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'; supported: FP8"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size is 0"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128: it must be two whole numbers"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        ({**PACKED, "config_groups": [INT4]}, "config_groups must be an object of objects"),
        ({**PACKED, "config_groups": {"a": {"format": "marlin-24"}}}, "format is 'marlin-24'"),
        ({**PACKED, "config_groups": {"a": {"weights": {"num_bits": 3}}}}, "num_bits is 3; supported: 4, 8"),
        (
            {**PACKED, "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}},
            "num_bits is 4; supported: 8",
        ),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        ({**PACKED, "transform_config": {"config_groups": {"R3": {}}}}, "transform_config is not supported"),
    ],
)
def test_what_is_not_read_is_named(settings: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        parse_quantisation({"quantization_config": settings}, "it")
