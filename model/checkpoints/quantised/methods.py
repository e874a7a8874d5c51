"""How a Hugging Face configuration says that weights are quantised (`quantization_config`). No torch.

| `quant_method` | what is read |
| --- | --- |
| `fp8` | float8_e4m3fn, a scale for all or for each block, as DeepSeek and Qwen publish them |
| `compressed-tensors` | `float-quantized`, `int-quantized`, `naive-quantized`, `pack-quantized` of 4 and 8 bits |
| `gptq` | 2, 4 and 8 bits, in any order of inputs (`desc_act`), `checkpoint_format` or `format` `gptq` and `gptq_v2` |
| `awq` | 4 bits, `version` or `format` `gemm` |
| `modelopt` | `quant_algo` `FP8`; in `hf_quant_config.json`, too, where older versions say it |

Weights alone are read: inputs are not rounded as a file says, and its scales of the KV cache are not taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hamburger.model.checkpoints.config.values import flag, whole
from hamburger.model.checkpoints.sources import CheckpointError, read_json

_REMEDY = "name a checkpoint with unquantised weights, or one of another method"
_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_PACKED_BITS = (4, 8)
_OF_MODELOPT = "hf_quant_config.json"
_FP8_BLOCK = (128, 128)  # of transformers, where a file does not say
_GPTQ_BITS = (2, 4, 8)

Method = Literal["fp8", "compressed-tensors", "gptq", "awq", "modelopt"]
METHODS: tuple[Method, ...] = ("fp8", "compressed-tensors", "gptq", "awq", "modelopt")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """bits: of a weight where several share a word; None where each has a byte of its own, or all have not the same.
    block: outputs and inputs that share a scale; None where the scales' shape says it.
    plus_one: whether what is kept of a zero is one less (the first GPTQ format).
    reordered: whether inputs that share a scale may lie apart, so that 32 neighbours need not lie on one grid.
    """

    method: Method
    bits: int | None = None
    block: tuple[int, int] | None = None
    plus_one: bool = False
    reordered: bool = False


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the quantization_config that older versions of ModelOpt wrote into a file of its own. Raises
    CheckpointError."""
    config, beside = read_json(folder / "config.json"), folder / _OF_MODELOPT
    if config.get("quantization_config") or not beside.is_file():
        return config
    found = read_json(beside).get("quantization")
    if not isinstance(found, dict):
        raise CheckpointError(f"{beside}: quantization is no object.")
    config = {**config, "quantization_config": {"quant_method": "modelopt", **found}}
    parse_quantisation(config, str(beside))  # what cannot be read is that file's
    return config


def parse_quantisation(config: Mapping[str, Any], where: str) -> Quantisation | None:
    """None where weights are plain numbers. Raises CheckpointError for what is not read; `where` names the file."""
    found = config.get("quantization_config")
    if not found:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} is no object.")
    match method := found.get("quant_method"):
        case "fp8":
            block = found.get("weight_block_size", list(_FP8_BLOCK))  # null: none
            return Quantisation(method, block=None if block is None else _block(block, "weight_block_size", where))
        case "modelopt":
            _only(found, "quant_algo", ("FP8",), where)
            return Quantisation(method)
        case "awq":
            _layout(found, ("version", "format"), ("gemm",), where)
            _only(found, "bits", (4,), where)
            return Quantisation(method, bits=4)
        case "gptq":
            layout = _layout(found, ("checkpoint_format", "format"), ("gptq", "gptq_v2"), where)
            bits = _only(found, "bits", _GPTQ_BITS, where)
            return Quantisation(
                method,
                bits=bits,
                plus_one=layout != "gptq_v2",
                reordered=flag(found, "desc_act", where, default=False),
            )
        case "compressed-tensors":
            return _compressed(found, where)
    raise CheckpointError(
        f"{where}: quant_method {method!r} is not supported; supported are: {', '.join(METHODS)}. {_REMEDY}."
    )


def _compressed(found: Mapping[str, Any], where: str) -> Quantisation:
    """As the library compressed-tensors writes it: each of config_groups has `weights`, and perhaps a format."""
    groups = found.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise CheckpointError(f"{where}: config_groups must be an object of objects.")
    for settings in (found, *groups.values()):
        _only(settings, "format", _FORMATS, where, default="dense")
    for field in ("sparsity_config", "transform_config"):
        changes = found.get(field)
        if changes and not (isinstance(changes, Mapping) and changes.get("format") == "dense"):
            raise CheckpointError(f"{where}: {field} is not supported. {_REMEDY}.")
    bits, blocks, reordered = set[int](), set[tuple[int, int]](), False
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            continue
        if weights.get("type", "int") == "int":
            bits.add(_only(weights, "num_bits", _PACKED_BITS, where))
        else:
            _only(weights, "num_bits", (8,), where)
        if weights.get("block_structure") is not None:
            blocks.add(_block(weights["block_structure"], "block_structure", where))
        reordered |= weights.get("actorder") in (True, "group")
    if len(blocks) > 1:
        raise CheckpointError(f"{where}: groups of several block_structure are not supported. {_REMEDY}.")
    return Quantisation(
        "compressed-tensors",
        bits=bits.pop() if len(bits) == 1 else None,
        block=blocks.pop() if blocks else None,
        reordered=reordered,
    )


def _layout(found: Mapping[str, Any], fields: tuple[str, ...], allowed: tuple[str, ...], where: str) -> Any:
    """What the first of the fields says that is there, in small letters, as in transformers; else allowed[0]."""
    field = next((name for name in fields if found.get(name) is not None), fields[0])
    value = found.get(field)
    said = value.lower() if isinstance(value, str) else value
    return _only({field: said}, field, allowed, where, default=allowed[0])


def _only(found: Mapping[str, Any], field: str, allowed: tuple[Any, ...], where: str, default: Any = None) -> Any:
    value = found.get(field)
    value = default if value is None else value
    if type(value) not in map(type, allowed) or value not in allowed:
        known = ", ".join(map(str, allowed))
        raise CheckpointError(f"{where}: {field} is {value!r}; supported: {known}. {_REMEDY}.")
    return value


def _block(value: Any, field: str, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"{where}: {field} is {value!r}: it must be two whole numbers.")
    rows, columns = (whole({field: size}, field, where) for size in value)
    return rows, columns
