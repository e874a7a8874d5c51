"""`hamburger plan` counts the weights of a CPU as its engine holds them: packed by the kernels, or in numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor, nn

from hamburger.engine.core.pool import lora_bytes
from hamburger.engine.plan.held import as_int8, as_packed
from hamburger.model.assemble import assemble
from hamburger.model.backend import Backend, TorchBackend
from hamburger.model.checkpoints.config.folder import read_model_config
from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.checkpoints.four_bits import four_bit_linears
from hamburger.model.checkpoints.gguf_file import open_gguf
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.backend import CpuBackend
from hamburger.model.cpu.library import Kernels, load_kernels
from hamburger.model.execution import Execution
from hamburger.model.modules.lora import LoraWeights
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.tensor_shapes import JOINED, layer_shapes, tensor_shapes
from hamburger.server.cli import main
from native_models import WIDE
from small_models import CPU, graft_config, random_tensors, trunk_config
from trunk_shapes import QWEN3_MOE

TIED = trunk_config(**WIDE, num_heads=2)
UNTIED = replace(TIED, tie_word_embeddings=False, vocab_size=100, qkv_bias=True, qk_norm="head")
FUSED = graft_config(features="fused", micro_norm=True, short_list_size=40, groups="verified")
CASES = {
    "tied": ModelConfig(trunk=TIED),
    "untied": ModelConfig(trunk=UNTIED),
    "experts": ModelConfig(trunk=trunk_config(**QWEN3_MOE)),
    "composed": ModelConfig(trunk=TIED, graft=graft_config()),
    "adapter": ModelConfig(trunk=UNTIED, graft=replace(FUSED, groups="composed"), adapter_rank=32),
    "verified": ModelConfig(trunk=TIED, graft=FUSED),
    "plain embedder": ModelConfig(trunk=replace(TIED, hidden_size=32), graft=graft_config(merger_heads=2)),
}


def backend_of(config: ModelConfig) -> CpuBackend:
    graft = config.graft
    draft_bits = 4 if graft is not None and graft.groups == "verified" else 8
    execution = Execution(kernels=load_kernels(), bits=8, draft_bits=draft_bits)
    steps = assemble(
        config, random_tensors(config), dtype=torch.float32, device=CPU, max_positions=200, execution=execution
    )
    found: Backend = steps.backend
    assert isinstance(found, CpuBackend)
    return found


def held_by(root: object) -> dict[int, int]:
    """The tensors that an object holds: address -> bytes. Those of the kernels themselves are what they work in."""
    found: dict[int, int] = {}
    seen, left = dict[int, object](), [root]  # which live on, as another would have the id of one that is gone
    while left:
        held = left.pop()
        if id(held) in seen or isinstance(held, Kernels):
            continue
        seen[id(held)] = held
        if isinstance(held, Tensor):
            found[held.data_ptr()] = max(found.get(held.data_ptr(), 0), held.nbytes)
        elif isinstance(held, dict):
            left += held.values()
        elif isinstance(held, list | tuple):
            left += held
        elif isinstance(held, nn.Module):
            left += [*held.parameters(), *held.buffers(), held.__dict__]
        elif type(held).__module__.startswith("hamburger."):
            left += [getattr(held, "__dict__", {}), *(getattr(held, name) for name in getattr(held, "__slots__", ()))]
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_the_kernels_hold_is_what_is_planned(name: str) -> None:
    config = CASES[name]
    backend = backend_of(config)
    measured = held_by(backend)
    rotary = backend._trunk._rotary
    assert isinstance(rotary, RotaryEmbedding)
    for tensor in rotary.buffers():  # as long as the context is
        del measured[tensor.data_ptr()]
    scales = 0 if config.graft is None else 2 * 4 * config.graft.max_group  # of the stop head
    assert sum(measured.values()) - scales == as_packed(config, 4).total


@pytest.mark.parametrize("name", ["tied", "untied", "experts", "composed", "adapter", "verified"])
def test_what_a_gpu_holds_in_8_bits_is_what_is_planned(name: str) -> None:
    config = CASES[name]
    execution = Execution(packed=False, int8=True)
    steps = assemble(
        config, random_tensors(config), dtype=torch.bfloat16, device=CPU, max_positions=200, execution=execution
    )
    measured = held_by(steps.backend)
    assert isinstance(steps.backend, TorchBackend)
    turned = [each for each in steps.backend.model.modules() if isinstance(each, RotaryEmbedding)]
    rotary = {tensor.data_ptr() for each in turned for tensor in each.buffers()}  # as long as the context is
    held = sum(size for address, size in measured.items() if address not in rotary)
    assert held == as_int8(config, 2).total


def test_four_bits_are_less_than_eight() -> None:
    config = CASES["tied"]
    linears = {name for name in tensor_shapes(config) if name.endswith("_proj.weight")}
    eight, four = as_packed(config, 2), as_packed(config, 2, linears)
    assert {name for name in four.tensors if four.tensors[name] < eight.tensors[name]} == linears
    assert all(four.tensors[name] * 544 == eight.tensors[name] * 320 for name in linears)


@pytest.mark.parametrize("rank", [5, 32, 40])
def test_an_adapter_of_the_kernels_takes_what_is_planned(rank: int) -> None:
    backend = backend_of(CASES["untied"])
    pairs = {}
    for layer in range(UNTIED.num_layers):
        for part in (part for parts in JOINED.values() for part in parts):
            outputs, inputs = layer_shapes(UNTIED, layer)[f"{part}.weight"]
            pairs[layer, part] = torch.randn(rank, inputs), torch.randn(outputs, rank)
    backend.loras.load(1, LoraWeights(pairs))
    assert sum(held_by(backend.loras).values()) == lora_bytes(UNTIED, rank, None)


def test_a_gguf_file_says_which_linears_have_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("builtin", None):  # the plain base, and what is grafted onto it
        source = resolve_source(model)
        found = four_bit_linears(source, read_model_config(source).trunk)
        assert len(found) == 30 * 7
        assert "model.layers.29.mlp.down_proj.weight" in found
    reader = open_gguf(resolve_source("builtin").path)
    [tensor] = [tensor for tensor in reader.tensors if tensor.name == "blk.3.attn_v.weight"]
    changed = [t if t is not tensor else t._replace(tensor_type=gguf.GGMLQuantizationType.Q8_0) for t in reader.tensors]

    class Changed:
        tensors = changed

    monkeypatch.setattr("hamburger.model.checkpoints.gguf_file.GgufReader", lambda path: Changed)
    lost = found - four_bit_linears(source, read_model_config(source).trunk)
    assert lost == {f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"}


AWQ = {"quant_method": "awq", "bits": 4}
GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("quantization", "has_four_bits"),
    [
        (None, False),
        (AWQ, True),
        (GPTQ, True),
        ({**GPTQ, "bits": 8}, False),
        ({**GPTQ, "desc_act": True}, False),
        ({"quant_method": "fp8"}, False),
    ],
)
def test_a_folder_says_it_of_all_its_linears(
    tmp_path: Path, quantization: dict[str, Any] | None, has_four_bits: bool
) -> None:
    config = {**trunk_config_json(UNTIED), **({} if quantization is None else {"quantization_config": quantization})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve_source(str(tmp_path))
    linears = {name for name in tensor_shapes(ModelConfig(trunk=UNTIED)) if name.endswith("_proj.weight")}
    assert four_bit_linears(source, UNTIED) == (linears if has_four_bits else set())
    grafted = replace(source, kind="hamburger", path=tmp_path / "graft", base_path=tmp_path)
    assert four_bit_linears(grafted, UNTIED) == four_bit_linears(source, UNTIED)


def test_experts_have_4_bits_too(tmp_path: Path) -> None:
    trunk = CASES["experts"].trunk
    (tmp_path / "config.json").write_text(json.dumps({**trunk_config_json(trunk), "quantization_config": AWQ}))
    found = four_bit_linears(resolve_source(str(tmp_path)), trunk)
    assert found <= tensor_shapes(CASES["experts"]).keys()
    assert "model.layers.0.mlp.experts.5.down_proj.weight" in found


def test_a_cpu_holds_what_its_kernels_read_or_numbers_and_a_tied_head_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def weights(*options: str) -> int:
        assert main(["plan", *options, "--kv-cache-memory", "1GiB", "--json"]) == 0
        found: int = json.loads(capsys.readouterr().out)["weights_bytes"]
        return found

    numbers, vocabulary = 134_515_008, 49_152 * 576
    rows = 30 * (576 + 2 * 192 + 576 + 2 * 1536 + 576)  # of all linears
    assert weights("builtin") == 2 * numbers
    # Groups of 32 weights: 20 bytes in 4 bits, 34 in 8; the head has both. Norms have four bytes each.
    linears, norms = numbers - vocabulary - 61 * 576, 61 * 576
    packed = linears // 32 * 20 + vocabulary // 32 * (34 + 20) + 4 * (norms + 49_152)
    assert weights("builtin", "--device", "cpu") == packed
    eight = packed + linears // 32 * (34 - 20)
    assert weights("builtin", "--device", "cpu", "--quantization", "int8", "--dtype", "float32") == eight
    assert weights("builtin", "--quantization", "int8") == linears + 4 * rows + 2 * (vocabulary + norms)
    assert weights("builtin", "--device", "cpu", "--quantization", "none") == 2 * (numbers + vocabulary)
    assert weights("builtin", "--device", "cpu", "--dtype", "float32") == 4 * (numbers + vocabulary)
    assert weights("builtin", "--device", "cpu", "--dtype", "float16") == 2 * numbers  # which oneDNN does not lay out
