"""A GGUF file of a Llama, Qwen or Gemma -> TrunkConfig and canonical tensors, dequantised once, cached as safetensors.

The cache holds the weights in the dtype they are served in: bfloat16 is half the bytes to read at every start, and
float32 keeps exactly what the quantised blocks say. It is keyed by the file's path, size and time, replaced atomically
(so two processes may make it at once) and made anew when it does not fit, or when a checksum says that it was damaged;
without it everything only starts slower.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hamburger.model.checkpoints.config.hf import parse_trunk_config, read_trunk_config, trunk_config_json
from hamburger.model.checkpoints.gguf_file import ARCHITECTURES, canonical_names, of_each_expert, open_gguf, value_of
from hamburger.model.checkpoints.relatives.gemma import gemma3_factors
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.checkpoints.weight_files import write_safetensors
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.modules.rotary import inverse_frequencies

CACHE_FORMAT = 3
"""Part of the cache's key: raised whenever what the cache holds for the same GGUF file changes."""

_GEMMA_27B = 62  # layers, by which llama.cpp knows it: its attention's scale is not of a head's size
_ROPE_FACTORS = "rope_freqs.weight"
# What ends a turn of a chat, by llama.cpp's names: its converter tells one end token, which of Gemma is that of a text.
_TURN_ENDS = {b"<|eot_id|>", b"<|eom_id|>", b"<|im_end|>", b"<|end|>", b"<end_of_turn>", b"<EOT>", b"_<EOT>"}
# The constants of every published Llama 3.1 and 3.2; a GGUF file keeps only the factors that follow from them.
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def load_gguf(
    path: Path,
    config_folder: Path | None,
    dtype: torch.dtype,
    on_progress: Callable[[str], None] = lambda line: None,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and canonically named tensors in `dtype`, not yet checked. Raises CheckpointError.

    config_folder: a folder whose config.json describes the model instead of the file's own metadata.
    """
    key, cache = _key(path), _cache_path(path, dtype)
    found = None if cache is None else _read_cache(cache, key)
    if found is None:
        on_progress(f"dequantising {path.name}, once")
        reader = open_gguf(path)
        trunk = _trunk_config(path, reader)
        found = trunk, _dequantise(path, reader, trunk, dtype)
        try:
            if cache is None:
                raise OSError("there is no home directory")
            _write_cache(cache, key, *found)
        except OSError as error:
            on_progress(f"the dequantised weights were not cached, so the next start is no faster: {error}")
    trunk, tensors = found
    return ModelConfig(trunk=trunk if config_folder is None else read_trunk_config(config_folder)), tensors


def read_gguf_config(path: Path) -> TrunkConfig:
    """The trunk that the file's own metadata describes; its weights stay where they are. Raises CheckpointError."""
    return _trunk_config(path, open_gguf(path))


def _trunk_config(path: Path, reader: gguf.GGUFReader) -> TrunkConfig:
    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else value_of(path, field)

    architecture = get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{path}: architecture {architecture!r} is not supported; supported: {known}.")

    def own(key: str) -> Any:
        return get(f"{architecture}.{key}")

    shapes = {tensor.name: tensor.shape.tolist()[::-1] for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path} has no token_embd.weight: name a GGUF file with a whole model.")
    hidden_size, num_heads, head_dim = own("embedding_length"), own("attention.head_count"), own("attention.key_length")
    if head_dim is None and type(num_heads) is int and type(hidden_size) is int and num_heads > 0:
        head_dim = hidden_size // num_heads
    unsupported = {
        f"{architecture}.rope.scaling.type": "none",
        f"{architecture}.rope.scale_linear": 1,
        f"{architecture}.rope.dimension_count": head_dim,
        f"{architecture}.attention.value_length": head_dim,
        f"{architecture}.expert_count": own("expert_count") if architecture == "qwen3moe" else 0,
        f"{architecture}.expert_shared_count": 0,
        f"{architecture}.final_logit_softcapping": 0,
        "split.count": 1,
    }
    if own("rope.scaling.type") is None:  # then a factor is that of linear scaling
        unsupported[f"{architecture}.rope.scaling.factor"] = 1
    scaling = None
    if architecture == "gemma3" and own("rope.scaling.type") == "linear":
        scaling = {"rope_type": "linear", "factor": _shortest(own("rope.scaling.factor"))}
        del unsupported["gemma3.rope.scaling.type"]
    for key, only in unsupported.items():
        if get(key, only) not in (only, 0):
            raise CheckpointError(f"{path}: {key} is {get(key)!r}, and only {only!r} is supported.")
    ids = [get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids += [*get("tokenizer.ggml.eos_token_ids", []), *_turn_ends(reader)]
    config = {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": own("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(own("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(own("rope.freq_base") or 10000.0),  # llama.cpp's, where the first converters told none
        "tie_word_embeddings": "output.weight" not in shapes,
        "max_position_embeddings": own("context_length"),
        "eos_token_id": list(dict.fromkeys(i for i in ids if i is not None)),
    }
    if architecture == "qwen3moe":  # all layers have them, and llama.cpp makes their chances sum to one
        config |= {"num_experts": own("expert_count"), "num_experts_per_tok": own("expert_used_count")}
        config |= {"moe_intermediate_size": own("expert_feed_forward_length"), "norm_topk_prob": True}
    if architecture == "gemma3":
        config |= {"sliding_window": own("attention.sliding_window"), "rope_scaling": scaling}
        # Not told where they are those that all of them have.
        config["sliding_window_pattern"] = own("attention.sliding_window_pattern")
        config["rope_local_base_freq"] = _shortest(own("rope.freq_base_swa"))
    if _ROPE_FACTORS in shapes:
        factors = next(tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS)
        plain = parse_trunk_config(config, str(path))
        config["rope_scaling"] = _llama3_scaling(path, plain, _numbers(path, factors).flatten())
    return parse_trunk_config(config, str(path))


def _turn_ends(reader: gguf.GGUFReader) -> list[int]:
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if tokens is None:
        return []
    return [token_id for token_id, part in enumerate(tokens.data) if tokens.parts[part].tobytes() in _TURN_ENDS]


def _shortest(value: Any) -> Any:
    """The decimal that was meant by a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _llama3_scaling(path: Path, plain: TrunkConfig, factors: Tensor) -> dict[str, Any]:
    """The llama3 rope scaling whose frequencies are the plain ones divided by `factors` [head_dim / 2]."""
    found: dict[str, Any] = {"rope_type": "llama3", "factor": factors.max().item(), "low_freq_factor": _LLAMA3_LOW}
    found |= {"high_freq_factor": _LLAMA3_HIGH, "original_max_position_embeddings": _LLAMA3_CONTEXT}
    rope = {**found, "rope_theta": plain.rope_theta}
    scaled = parse_trunk_config(trunk_config_json(plain) | {"rope_parameters": rope}, str(path))
    assumed = inverse_frequencies(plain) / inverse_frequencies(scaled)
    if factors.shape != assumed.shape or not torch.allclose(factors, assumed, rtol=1e-3):
        raise CheckpointError(f"{path}: {_ROPE_FACTORS} is not the rope scaling of Llama 3, the only one supported.")
    return found


def _dequantise(path: Path, reader: gguf.GGUFReader, trunk: TrunkConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensor by tensor, so that float32 is never held for more than one. Unknown names stay for the strict check."""
    tensors: dict[str, Tensor] = {}
    names = canonical_names(trunk)
    turned = {"q_proj": trunk.num_heads, "k_proj": trunk.num_kv_heads} if trunk.architecture == "llama" else {}
    factors = _factors(trunk)
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        name, weight = names.get(tensor.name, f"gguf.{tensor.name}"), _numbers(path, tensor)
        part = name.split(".")[-2]
        if heads := turned.get(part):
            weight = _unpermute(weight, heads, path, tensor.name)
        if ".mlp.experts." in name and weight.dim() == 3:
            each = of_each_expert(name, len(weight))
            tensors |= {own: one.to(dtype) for own, one in zip(each, weight, strict=True)}
            continue
        factor = factors.get(name, factors.get(part, 1.0))
        tensors[name] = (weight if factor == 1.0 else weight * factor).to(dtype)
    return tensors


def _factors(trunk: TrunkConfig) -> dict[str, float]:
    """A tensor's name, or a part of a layer -> what it is multiplied by. Gemma's norms are by 1 + weight already."""
    if trunk.architecture != "gemma3_text":
        return {}
    attends = trunk.hidden_size // trunk.num_heads if trunk.num_layers == _GEMMA_27B else trunk.head_dim
    return gemma3_factors(trunk.hidden_size, trunk.head_dim / attends, tied=trunk.tie_word_embeddings)


def _numbers(path: Path, tensor: gguf.ReaderTensor) -> Tensor:
    """float32 in the tensor's own shape."""
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise CheckpointError(f"{path}: {tensor.name} is {kind}, which the gguf library cannot dequantise.") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {tensor.name} has not the size that the file says: {error}.") from error
    # The file is mapped read-only; torch wants memory that it may write.
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def _unpermute(weight: Tensor, num_heads: int, path: Path, name: str) -> Tensor:
    """Rows back in Hugging Face's order.

    llama.cpp rotates neighbours (rows 0 and 1), Hugging Face the two halves of a head (rows 0 and head_dim / 2), so
    its converter interleaves each head's halves.
    """
    if weight.dim() != 2 or weight.shape[0] % (2 * num_heads):
        raise CheckpointError(
            f"{path}: {name} has the shape {tuple(weight.shape)}, which {num_heads} heads cannot share."
        )
    rows, width = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _key(path: Path) -> str:
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return json.dumps([CACHE_FORMAT, stat.st_size, stat.st_mtime_ns])


def _cache_path(path: Path, dtype: torch.dtype) -> Path | None:
    """One cache file for each GGUF path and dtype, so that a newer file's cache takes the place of the older one's."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    path_hash = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:12]
    return folder / "hamburger" / f"{path.stem}-{path_hash}-{str(dtype).removeprefix('torch.')}.safetensors"


def _read_cache(cache: Path, key: str) -> tuple[TrunkConfig, dict[str, Tensor]] | None:
    """The weights, mapped into memory; None where there is no whole and undamaged cache of this key."""
    try:
        with safe_open(cache, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != key:
                return None
            trunk = parse_trunk_config(json.loads(metadata["trunk"]), str(cache))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return (trunk, tensors) if metadata["crc32"] == _checksum(tensors) else None
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of the weights: .07 s for 270 MB, where dequantising takes seconds."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _write_cache(cache: Path, key: str, trunk: TrunkConfig, tensors: dict[str, Tensor]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=cache.parent, prefix=cache.stem, suffix=".tmp")
    part = Path(name)
    try:
        os.close(handle)
        described = {"key": key, "trunk": json.dumps(trunk_config_json(trunk)), "crc32": _checksum(tensors)}
        write_safetensors(part, tensors, described)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # a crash after the rename must not leave a file of the right size and no content
        part.replace(cache)
    finally:
        part.unlink(missing_ok=True)
