"""A LoRA adapter's folder, as PEFT writes it (adapter_config.json, adapter_model.safetensors) -> LoraWeights.

What would change more than the trunk's linears, or change them in another way, is refused by name: every field of the
configuration that is not known to change nothing here must be off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hamburger.model.checkpoints.relatives.retelling import retold_name, retold_tensors
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource, read_json
from hamburger.model.checkpoints.weight_files import read_safetensors
from hamburger.model.config import TrunkConfig
from hamburger.model.modules.lora import LoraWeights
from hamburger.model.tensor_shapes import JOINED, layer_shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LINEARS = tuple(part for parts in JOINED.values() for part in parts)
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MODULE = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(\w+\.\w+)")
# Linears that relatives/ cuts apart, by what it makes of them.
_CUT = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_MAY_HAVE = {*_LINEARS, "self_attn.qkv_proj", "mlp.gate_up_proj"}
# Fields that are read below, or say how it was trained.
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "peft_type", "init_lora_weights", "bias"}
_OF_TRAINING = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config",
    "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_LONGEST_MODULE = 64  # characters: what a pattern may cost grows with their fourth power
_LONGEST_PATTERN, _MOST_REPEATS, _MOST_GROUPS, _MOST_PATTERNS = 2000, 4, 3, 2000
_MOST_REPEATS_OF_ALL = 400
_REPEAT = re.compile(r"[*+?{]")
_GROUP = re.compile(r"\((?:\?:)?[\w.|\\\[\]-]*\)(?![*+?{])")
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base's weights, too


def read_lora(folder: Path, trunk: TrunkConfig, max_rank: int, base: Mapping[str, Any] | None = None) -> LoraWeights:
    """base: the configuration of the model that the trunk was made of (base_config), whose words the adapter speaks.

    Raises CheckpointError for an adapter that is not of this trunk, of a higher rank, or of a kind that is not served,
    and for any where the trunk's linears were retold and base is not what they were retold from.
    """
    if trunk.retold_from not in (None, (base or {}).get("model_type")):
        raise CheckpointError(
            f"{folder} is not served with this model, whose folder holds the weights of a {trunk.retold_from} in "
            "another form than the adapter was trained on. Serve the base itself, or a HAMburger folder that refers to "
            "it (hamburger export without --merge)."
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: name one with {CONFIG} and {WEIGHTS}, as PEFT saves an adapter.")
    config = read_json(folder / CONFIG)
    _check_kind(config, str(folder / CONFIG))
    _check_patterns(config, str(folder / CONFIG))
    file = folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: only safetensors weights are read.")
    if file.stat().st_size > (most := _most_bytes(trunk, max_rank)):
        raise CheckpointError(
            f"{file} has {file.stat().st_size >> 20:,} MiB, more than an adapter of rank {max_rank} (max_lora_rank) of "
            f"this model can ({most >> 20:,} MiB)."
        )
    widest = _widest(trunk)
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_safetensors(file, mapped=False).items():  # requests may load it while it is written
        match = _TENSOR.fullmatch(name)
        is_short = match is not None and len(match["module"]) <= _LONGEST_MODULE
        linear = _MODULE.fullmatch(retold_name(base or {}, match["module"])) if match and is_short else None
        if match is None or linear is None:
            raise _of_no_linear(name, trunk, str(file))
        if int(linear[1]) >= trunk.num_layers or linear[2] not in _MAY_HAVE:  # before any pattern takes its time for it
            raise _of_no_linear(match["module"], trunk, str(file))
        if tensor.dim() != 2 or tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{file}: {name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, but the two "
                "matrices of an adapter are of floating point numbers (float32, bfloat16 or float16)."
            )
        if max(tensor.shape) > widest:  # told before it is converted, which may take more memory than there is
            raise CheckpointError(
                f"{file}: {name} is {list(tensor.shape)}, wider than any linear of this model ({widest}): the adapter "
                "is of another model."
            )
        sides = found.setdefault(match["module"], {})
        if match["side"] in sides:
            raise CheckpointError(f"{file} holds lora_{match['side']} of {match['module']} twice.")
        sides[match["side"]] = tensor
    if not found:
        raise CheckpointError(f"{file} holds no tensors.")
    alphas = _OfModules(config, "lora_alpha", "alpha_pattern", str(file))
    ranks = None if config.get("r") is None else _OfModules(config, "r", "rank_pattern", str(file))
    is_stable = bool(config.get("use_rslora"))
    pairs = {
        retold_name(base or {}, module): _scaled(module, sides, alphas, ranks, is_stable, max_rank, str(file))
        for module, sides in found.items()
    }
    # Factors of a linear, and cuts of it, concern its outputs: those of B.
    ups = retold_tensors(base or {}, {f"{module}.weight": up for module, (_, up) in pairs.items()}, str(file))
    fitting: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    for name, up in ups.items():
        module = name.removesuffix(".weight")
        match = _MODULE.fullmatch(module)
        if match is None or match[2] not in _LINEARS or int(match[1]) >= trunk.num_layers:
            raise _of_no_linear(module, trunk, str(file))
        head, _, own = module.rpartition(".")
        down = pairs[module if module in pairs else f"{head}.{_CUT[own]}"][0]
        shape = layer_shapes(trunk, int(match[1])).get(f"{match[2]}.weight")
        if shape is None:  # the layer has experts in its place
            raise _of_no_linear(module, trunk, str(file))
        _check_shapes(module, down, up, shape, str(file))
        fitting[int(match[1]), match[2]] = down, up
    return LoraWeights(fitting)


def base_config(source: ModelSource) -> dict[str, Any]:
    """The configuration of the model whose weights are a source's trunk, as its makers wrote it; empty where there is
    none. Raises CheckpointError."""
    for path in (source.base_path, source.path):
        if path is not None and (file := path / "config.json").is_file():
            return read_json(file)
    return {}


def _widest(trunk: TrunkConfig) -> int:
    """Inputs or outputs of the widest linear, joined ones as one."""
    shapes = [
        [shape for part in parts if (shape := of_layer.get(f"{part}.weight")) is not None]
        for of_layer in (layer_shapes(trunk, layer) for layer in range(trunk.num_layers))
        for parts in JOINED.values()
    ]
    return max(size for linears in shapes if linears for size in (sum(o for o, _ in linears), linears[0][1]))


def _most_bytes(trunk: TrunkConfig, max_rank: int) -> int:
    """Of a file that is read whole: float64, four times the highest rank so that higher ones are told by name."""
    sizes = sum(
        sum(shape)
        for layer in range(trunk.num_layers)
        for shape in layer_shapes(trunk, layer).values()
        if len(shape) == 2
    )
    return 8 * sizes * max(4 * max_rank, 256) + (64 << 20)


def _of_no_linear(name: str, trunk: TrunkConfig, where: str) -> CheckpointError:
    but = "" if trunk.experts is None else "; experts and their router have none"
    return CheckpointError(
        f"{where}: {name[:200]} is of no linear of this model's {trunk.num_layers} layers, which alone may have an "
        f"adapter ({', '.join(_LINEARS)}{but})."
    )


def _check_patterns(config: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for a regular expression that may take for ever, as some with repeats within repeats or
    many groups do: it is an adapter's, which is data."""
    all_repeats = 0
    for name in ("alpha_pattern", "rank_pattern"):
        patterns = config.get(name)
        if isinstance(patterns, Mapping) and len(patterns) > _MOST_PATTERNS:
            raise CheckpointError(
                f"{where}: {name} has {len(patterns):,} patterns, but at most {_MOST_PATTERNS:,} are read."
            )
        for pattern in patterns if isinstance(patterns, Mapping) else ():
            plain, num_groups = _GROUP.subn("", pattern)
            repeats = max(len(_REPEAT.findall(part)) for part in plain.split("|"))
            is_long = len(pattern) > _LONGEST_PATTERN or num_groups > _MOST_GROUPS or repeats > _MOST_REPEATS
            if is_long or "(" in plain or ")" in plain:
                raise CheckpointError(
                    f"{where}: {name} {pattern[:100]!r} is not read: a pattern may have {_LONGEST_PATTERN} "
                    f"characters, {_MOST_REPEATS} repeats in each alternative, and {_MOST_GROUPS} groups of names, "
                    "none within another or repeated."
                )
            all_repeats += len(_REPEAT.findall(plain))
    if all_repeats > _MOST_REPEATS_OF_ALL:
        raise CheckpointError(
            f"{where}: alpha_pattern and rank_pattern have {all_repeats:,} repeats, but at most "
            f"{_MOST_REPEATS_OF_ALL} are read: name the modules in full."
        )


def _check_kind(config: Mapping[str, Any], where: str) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type is {config.get('peft_type')!r}, but only LORA adapters are served.")
    if config.get("bias") not in (None, "none"):
        raise CheckpointError(
            f"{where}: bias is {config['bias']!r}, but adapters with biases are not served: train with none."
        )
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{where}: init_lora_weights is {config['init_lora_weights']!r}, which changed the base's weights as well: "
            "convert it to a plain adapter (PEFT's path_initial_model_for_weight_conversion)."
        )
    for name, value in config.items():
        if value and name not in _READ | _OF_TRAINING:
            raise CheckpointError(
                f"{where}: {name} is {value!r}, which is not served: train without it, or merge the adapter."
            )


class _OfModules:
    """A number for each module, as PEFT chooses: of the first pattern that its name's end matches, else `field`."""

    def __init__(self, config: Mapping[str, Any], field: str, patterns: str, where: str) -> None:
        """Raises CheckpointError for what is no pattern."""
        self._default, self._message = config.get(field), f"{where}: {field} or {patterns} of {CONFIG} give no number"
        try:
            own = (config.get(patterns) or {}).items()
            self._patterns = [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in own]
        except (AttributeError, OverflowError, re.error) as error:
            raise CheckpointError(f"{self._message}: {error}.") from error

    def of(self, module: str) -> float:
        """Raises CheckpointError."""
        value = next((value for pattern, value in self._patterns if pattern.match(module)), self._default)
        try:
            return float(str(value))
        except ValueError as error:
            raise CheckpointError(f"{self._message} for {module}.") from error


def _scaled(
    module: str,
    sides: Mapping[str, Tensor],
    alphas: _OfModules,
    ranks: _OfModules | None,
    is_stable: bool,
    max_rank: int,
    where: str,
) -> tuple[Tensor, Tensor]:
    """A and B in float32, B with the scaling: alpha / rank, or, if stable (arXiv 2312.03732), alpha / sqrt(rank)."""
    if len(sides) < 2:
        raise CheckpointError(f"{where}: {module} has only one of lora_A and lora_B.")
    rank = len(sides["A"])
    if rank > max_rank:
        raise CheckpointError(f"{where}: the rank of {module} is {rank}, above max_lora_rank ({max_rank}): raise it.")
    told = None if ranks is None else ranks.of(module)
    if told not in (None, rank) and sides["B"].shape[1] == rank:  # the scaling would not be that of its training
        raise CheckpointError(
            f"{where}: the rank of {module} is {rank}, but {CONFIG} says {told:g}: they are of two adapters."
        )
    scaling = alphas.of(module) / (math.sqrt(max(rank, 1)) if is_stable else max(rank, 1))
    down, up = sides["A"].float(), sides["B"].float() * scaling
    if not (down.sum() + up.sum()).isfinite():
        raise CheckpointError(f"{where}: the tensors of {module} hold numbers that are not finite.")
    return down, up


def _check_shapes(module: str, down: Tensor, up: Tensor, linear: tuple[int, ...], where: str) -> None:
    rank = len(down)
    if not rank or down.shape != (rank, linear[1]) or up.shape != (linear[0], rank):
        raise CheckpointError(
            f"{where}: lora_A and lora_B of {module} are {list(down.shape)} and {list(up.shape)}, but this model's "
            f"linear is {list(linear)}: the adapter is of another model."
        )
