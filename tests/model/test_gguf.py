"""GGUF files made here with llama.cpp's own row order, the embedded model, and the cache of dequantised weights."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gguf_files import gguf_file
from hamburger.model.checkpoints import gguf_weights
from hamburger.model.checkpoints.config.hf import read_trunk_config
from hamburger.model.checkpoints.gguf_file import open_gguf
from hamburger.model.checkpoints.gguf_weights import load_gguf
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN, CheckpointError, embedded_gguf, resolve_source
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.cpu.weights import has_4_bits
from hamburger.model.modules.rotary import inverse_frequencies
from hamburger.model.rope_scaling import Llama3RopeScaling
from small_models import random_tensors, trunk_config

Kind = gguf.GGMLQuantizationType
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Rows of 32 numbers and more, which the quantised kinds ask for.
TRUNK = trunk_config(hidden_size=64, intermediate_size=96, head_dim=16, rms_norm_eps=1e-5)


def read_gguf_config(path: Path) -> TrunkConfig:
    """Without the weights: dequantising the embedded model would take seconds."""
    return gguf_weights._trunk_config(path, open_gguf(path))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hamburger"


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_gguf(
    path: Path,
    trunk: TrunkConfig,
    tensors: dict[str, Tensor],
    kind: Kind = Kind.F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    architecture: str = "llama",
) -> Path:
    with gguf_file(path, architecture, trunk) as writer:
        writer.add_rope_dimension_count(trunk.head_dim)
        for name, tensor in tensors.items():
            stem, values = name.removesuffix(".weight"), tensor.numpy()
            if stem.startswith("model.layers."):
                layer, part = stem.removeprefix("model.layers.").split(".", 1)
                their_name = f"blk.{layer}.{LAYER_NAMES[part]}.weight"
                heads = {"self_attn.q_proj": trunk.num_heads, "self_attn.k_proj": trunk.num_kv_heads}.get(part)
                values = permuted(values, heads) if heads else values
            else:
                their_name = NAMES[stem] + ".weight"
            row_kind = kind if values.ndim > 1 else Kind.F32
            writer.add_tensor(their_name, gguf.quants.quantize(values, row_kind), raw_dtype=row_kind)
        change(writer)
    return path


def small_gguf(tmp_path: Path, **kwargs: Any) -> Path:
    return write_gguf(tmp_path / "small.gguf", TRUNK, random_tensors(ModelConfig(trunk=TRUNK)), **kwargs)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_comes_back_equal(tmp_path: Path, kind: Kind, tied: bool) -> None:
    trunk = trunk_config(
        hidden_size=64, intermediate_size=96, head_dim=16, rope_theta=123456.0, tie_word_embeddings=tied
    )
    tensors = random_tensors(ModelConfig(trunk=trunk))
    write_gguf(tmp_path / "small.gguf", trunk, tensors, kind)
    loaded = load_checkpoint(resolve_source(str(tmp_path / "small.gguf")), torch.float32)
    assert loaded.config == ModelConfig(trunk=trunk)
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        # Quantising works on rows, which the order of rows does not change.
        row_kind = kind if tensor.dim() > 1 else Kind.F32
        rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), row_kind), row_kind)
        assert torch.equal(loaded.tensors[name], torch.from_numpy(rounded)), name


@pytest.mark.parametrize(
    ("kind", "has_four"),
    [(Kind.Q4_0, True), (Kind.Q4_1, True), (Kind.Q4_K, True), (Kind.Q5_0, False), (Kind.Q6_K, False)],
)
def test_weights_of_4_bits_are_told_by_their_numbers(kind: Kind, has_four: bool) -> None:
    generator = np.random.default_rng(5)
    if kind in (Kind.Q4_K, Kind.Q6_K):  # which the library reads and does not write
        blocks = generator.integers(0, 256, (64, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        if kind == Kind.Q4_K:  # two factors, then scales and least values of 6 bits: 32 to 47 of each
            blocks[:, :4] = np.array([0.01, 0.08], np.float16).view(np.uint8)
            blocks[:, 4:12] = blocks[:, 4:12] & 0x0F | 0xA0
        else:
            blocks[:, -2:] = np.array([0.01], np.float16).view(np.uint8)
        weight = gguf.quants.dequantize(blocks, kind)
    else:
        numbers = generator.standard_normal((64, 256)).astype(np.float32)
        weight = gguf.quants.dequantize(gguf.quants.quantize(numbers, kind), kind)
    assert has_4_bits(torch.from_numpy(weight)) == has_four
    assert has_4_bits(torch.from_numpy(weight).bfloat16()) == has_four


def test_the_embedded_model_has_the_shape_that_its_config_says() -> None:
    assert read_gguf_config(embedded_gguf()) == read_trunk_config(BUILTIN)


def test_end_tokens_of_a_chat_are_end_tokens(tmp_path: Path) -> None:
    def end_of_turn(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(1)

    assert read_gguf_config(small_gguf(tmp_path, change=end_of_turn)).eos_token_ids == (1, 7)


def test_tokens_that_end_turns_are_known_by_their_names(tmp_path: Path) -> None:
    """As llama.cpp knows them: of Gemma 3 its converter tells the end of a text alone."""

    def names(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|im_end|>"])
        writer.add_array("tokenizer.ggml.eos_token_ids", [1, 9])

    assert read_gguf_config(small_gguf(tmp_path, change=names)).eos_token_ids == (1, 9, 3, 4)


def test_the_first_converters_told_no_rotary_base(tmp_path: Path) -> None:
    def forget(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.rope.freq_base"]

    assert read_gguf_config(small_gguf(tmp_path, change=forget)).rope_theta == 10000.0


def rope_factors(scaling: Llama3RopeScaling) -> Callable[[gguf.GGUFWriter], None]:
    plain = trunk_config(head_dim=64, rope_theta=500000.0)
    scaled = trunk_config(head_dim=64, rope_theta=500000.0, rope_scaling=scaling)
    factors = inverse_frequencies(plain) / inverse_frequencies(scaled)
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors.numpy())


def llama3(**changes: Any) -> Llama3RopeScaling:
    fields = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return Llama3RopeScaling(**{**fields, "original_max_position_embeddings": 8192, **changes})


def test_the_rope_scaling_of_llama_3_follows_from_its_factors(tmp_path: Path) -> None:
    trunk = trunk_config(head_dim=64, rope_theta=500000.0)
    tensors = random_tensors(ModelConfig(trunk=trunk))
    path = write_gguf(tmp_path / "llama3.gguf", trunk, tensors, change=rope_factors(llama3()))
    loaded = load_checkpoint(resolve_source(str(path)), torch.float32)
    assert loaded.config.trunk.rope_scaling == llama3()
    for wrong in (llama3(original_max_position_embeddings=4096), llama3(high_freq_factor=8.0)):
        path = write_gguf(tmp_path / "other.gguf", trunk, tensors, change=rope_factors(wrong))
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            read_gguf_config(path)


def linear_scaling(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)


def factor_without_type(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_factor(4.0)


def first_linear_scaling(writer: gguf.GGUFWriter) -> None:
    writer.add_float32("llama.rope.scale_linear", 4.0)


def experts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(8)


def one_of_two_files(writer: gguf.GGUFWriter) -> None:
    writer.add_uint16("split.count", 2)


def bias(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"architecture": "phi3"}, "phi3.*supported: llama, qwen2, qwen3, qwen3moe, gemma3"),
        ({"change": linear_scaling}, r"rope\.scaling\.type is 'linear'"),
        ({"change": factor_without_type}, r"rope\.scaling\.factor is 4\.0"),
        ({"change": first_linear_scaling}, r"rope\.scale_linear is 4\.0"),
        ({"change": experts}, "expert_count is 8"),
        ({"change": one_of_two_files}, r"split\.count is 2"),
        ({"change": bias}, r"unknown.*blk\.0\.attn_q\.bias"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path: Path, kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(resolve_source(str(small_gguf(tmp_path, **kwargs))), torch.float32)


@pytest.mark.parametrize("kept", [0, 3, 100, 700, 60000])
def test_a_file_cut_short_is_refused(tmp_path: Path, kept: int) -> None:
    path = small_gguf(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"small\.gguf"):
        load_checkpoint(resolve_source(str(path)), torch.float32)


def test_the_cache_is_used_and_keeps_the_weights_in_their_dtype(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_gguf(tmp_path, kind=Kind.Q4_1)
    lines: list[str] = []
    exact = load_gguf(path, None, torch.float32, lines.append)
    half = load_gguf(path, None, torch.bfloat16, lines.append)
    assert len(lines) == len(list(cache.iterdir())) == 2
    monkeypatch.setattr(gguf_weights, "open_gguf", None)  # from here on the GGUF file is not read
    for (config, tensors), dtype in ((exact, torch.float32), (half, torch.bfloat16)):
        again_config, again = load_gguf(path, None, dtype, lines.append)
        assert again_config == config
        assert all(torch.equal(again[name], tensors[name]) for name in tensors)
        assert all(torch.equal(again[name], exact[1][name].to(dtype)) for name in tensors)
    assert len(lines) == 2


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def scribble(file: Path) -> None:
    file.write_bytes(b"\xff" * 100)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    """One bit of one weight."""
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("spoil", [cut, scribble, empty, flip])
def test_a_spoilt_cache_is_made_anew(tmp_path: Path, cache: Path, spoil: Callable[[Path], None]) -> None:
    path = small_gguf(tmp_path)
    first = load_gguf(path, None, torch.float32)[1]
    first = {name: tensor.clone() for name, tensor in first.items()}
    (file,) = cache.iterdir()
    size = file.stat().st_size
    spoil(file)
    again = load_gguf(path, None, torch.float32)[1]
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert [file.stat().st_size for file in cache.iterdir()] == [size]
    lines: list[str] = []
    load_gguf(path, None, torch.float32, lines.append)
    assert lines == []


@pytest.mark.parametrize("changed", ["time", "size", "format"])
def test_another_file_or_format_takes_the_old_caches_place(
    tmp_path: Path, cache: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_gguf(tmp_path)
    load_gguf(path, None, torch.float32)
    if changed == "time":
        os.utime(path, ns=(1, 1))
    elif changed == "size":
        stat = path.stat()
        small_gguf(tmp_path, kind=Kind.Q8_0)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    else:
        monkeypatch.setattr(gguf_weights, "CACHE_FORMAT", -1)
    lines: list[str] = []
    load_gguf(path, None, torch.float32, lines.append)
    assert len(lines) == len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_only_said(tmp_path: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    lines: list[str] = []
    for _ in range(2):
        assert load_gguf(small_gguf(tmp_path), None, torch.float32, lines.append)[1]
    assert [("not cached" in line) for line in lines] == [False, True, False, True]


@pytest.mark.slow
def test_two_processes_at_once_leave_one_whole_cache(tmp_path: Path, cache: Path) -> None:
    path = small_gguf(tmp_path)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=load_gguf, args=(path, None, torch.float32)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(list(cache.iterdir())) == 1
    lines: list[str] = []
    load_gguf(path, None, torch.float32, lines.append)
    assert lines == []


def test_a_config_folder_takes_the_place_of_the_files_metadata(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 77, "eos_token_id": [5]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    trunk = load_gguf(small_gguf(tmp_path), tmp_path, torch.float32)[0].trunk
    assert (trunk.max_position_embeddings, trunk.eos_token_ids) == (77, (5,))
