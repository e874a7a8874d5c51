"""Loads every kind of checkpoint into one strict set of canonical tensors (config.tensor_shapes), and saves ours.

safetensors, or torch.load with weights_only=True; nothing else is ever read, and no code from a checkpoint runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hamburger.model.config import ConfigError, GraftConfig, ModelConfig, tensor_shapes
from hamburger.model.gguf_weights import load_gguf
from hamburger.model.hf_config import parse_trunk_config, read_trunk_config, trunk_config_json
from hamburger.model.lightning import load_lightning
from hamburger.model.sources import BUILTIN, CheckpointError, ModelSource, embedded_gguf, read_json

FORMAT_VERSION = 1
_CONFIG_KEYS = {"model_type", "format_version", "trunk", "base", "graft", "adapter"}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's shape and all its tensors, by canonical name; checked to be complete."""

    config: ModelConfig
    tensors: dict[str, Tensor]


def load_checkpoint(
    source: ModelSource, dtype: torch.dtype, *, on_progress: Callable[[str], None] = lambda line: None
) -> Checkpoint:
    """Read a model; floating tensors come in `dtype`. Raises CheckpointError that names the file, tensor or field."""
    try:
        if source.kind == "hamburger":
            checkpoint = _load_ours(source, dtype, on_progress)
        elif source.kind == "lightning":
            checkpoint = Checkpoint(*load_lightning(source))
        elif source.kind == "gguf":
            checkpoint = Checkpoint(*load_gguf(source.path, source.base_path, dtype, on_progress))
        else:
            checkpoint = Checkpoint(ModelConfig(trunk=read_trunk_config(source.path)), read_folder(source.path))
    except ConfigError as error:
        raise CheckpointError(f"{source.path}: {error}") from error
    tensors = verified(checkpoint.config, checkpoint.tensors, str(source.path))
    return Checkpoint(checkpoint.config, {name: _cast(tensor, dtype) for name, tensor in tensors.items()})


def verified(config: ModelConfig, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Exactly the tensors that the shape asks for; a missing, extra or misshaped one raises CheckpointError."""
    wanted = tensor_shapes(config)
    tensors = {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.trunk.tie_word_embeddings and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        if not torch.equal(head, tensors.get("model.embed_tokens.weight", head)):
            raise CheckpointError(f"{where}: lm_head.weight differs from the embedding although the config ties them.")
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted]
    misshaped = [
        f"{name} (is {list(tensors[name].shape)}, should be {list(shape)})"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    for problem, names in (("missing", missing), ("unknown", extra), ("misshaped", misshaped)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(f"{where}: {problem} tensors: {', '.join(names[:5])}{more}.")
    return tensors


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors: one file, or the shards that the index names."""
    if (folder / _INDEX).is_file():
        files = sorted(set(read_json(folder / _INDEX).get("weight_map", {}).values()))
    elif (folder / _WEIGHTS).is_file():
        files = [_WEIGHTS]
    else:
        raise CheckpointError(f"{folder} has no {_WEIGHTS} and no {_INDEX}: only safetensors weights are read.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise CheckpointError(f"{folder / _INDEX} names {file}, which is not there.")
        tensors |= read_safetensors(folder / file)
    return tensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """A file's tensors, memory-mapped. Raises CheckpointError when it is truncated or no safetensors file."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def save_checkpoint(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    base: str | None = None,
    adapter: tuple[int, float] | None = None,
) -> None:
    """Write our format: config.json and model.safetensors.

    tensors: canonical tensors; with `base` (a folder, hub id or "builtin") only the graft's, and with `adapter`
    (rank, alpha) also `adapter.<linear>.lora_A` [rank, in] and `.lora_B` [out, rank].
    """
    settings: dict[str, Any] = {"model_type": "hamburger", "format_version": FORMAT_VERSION}
    settings |= {"trunk": trunk_config_json(config.trunk)} if base is None else {"base": base}
    if config.graft is not None:
        settings["graft"] = dataclasses.asdict(config.graft)
    if adapter is not None:
        settings["adapter"] = {"rank": adapter[0], "alpha": adapter[1]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _load_ours(source: ModelSource, dtype: torch.dtype, on_progress: Callable[[str], None]) -> Checkpoint:
    where = str(source.path / "config.json")
    settings = read_json(source.path / "config.json")
    if unknown := sorted(set(settings) - _CONFIG_KEYS):
        raise CheckpointError(f"{where}: unknown keys: {', '.join(unknown)}.")
    if settings.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format_version is {settings.get('format_version')!r}; this version reads {FORMAT_VERSION}."
        )
    tensors = read_folder(source.path)
    if source.base_path is None:
        if "trunk" not in settings:
            raise CheckpointError(f"{where}: it has neither trunk nor base: name the base model with --base.")
        trunk = parse_trunk_config(settings["trunk"], where)
    else:
        base = _load_base(source.base_path, on_progress)
        trunk = base.config.trunk
        tensors = {**base.tensors, **tensors}
    tensors = _merge_adapter(tensors, settings.get("adapter"), where)
    return Checkpoint(ModelConfig(trunk=trunk, graft=_graft(settings.get("graft"), where)), tensors)


def _load_base(folder: Path, on_progress: Callable[[str], None]) -> Checkpoint:
    """A referenced base, in float32 so that an adapter is merged exactly."""
    if folder == BUILTIN:
        config, tensors = load_gguf(embedded_gguf(), BUILTIN, torch.float32, on_progress)
        return Checkpoint(config, tensors)
    config = ModelConfig(trunk=read_trunk_config(folder))
    return Checkpoint(config, verified(config, read_folder(folder), str(folder)))


def _graft(fields: Any, where: str) -> GraftConfig | None:
    if fields is None:
        return None
    known = {f.name for f in dataclasses.fields(GraftConfig)}
    if not isinstance(fields, dict) or (unknown := sorted(set(fields) - known)):
        raise CheckpointError(
            f"{where}: graft has unknown keys: {', '.join(unknown) if isinstance(fields, dict) else fields}."
        )
    try:
        return GraftConfig(**{**fields, "feature_layers": tuple(fields.get("feature_layers", ()))})
    except TypeError as error:
        raise CheckpointError(f"{where}: graft: {error}.") from error


def _merge_adapter(tensors: dict[str, Tensor], adapter: Any, where: str) -> dict[str, Tensor]:
    """W + alpha / rank * B A for every adapted linear, in float32 (LoRA, arXiv 2106.09685)."""
    pairs = {
        name.removesuffix(".lora_A") for name in tensors if name.startswith("adapter.") and name.endswith(".lora_A")
    }
    if adapter is None and not pairs:
        return tensors
    if not isinstance(adapter, dict) or set(adapter) != {"rank", "alpha"} or not pairs:
        raise CheckpointError(f"{where}: adapter tensors and adapter {{rank, alpha}} must come together.")
    rank, scale = int(adapter["rank"]), float(adapter["alpha"]) / int(adapter["rank"])
    merged = dict(tensors)
    for pair in sorted(pairs):
        target = pair.removeprefix("adapter.") + ".weight"
        a, b = merged.pop(f"{pair}.lora_A"), merged.pop(f"{pair}.lora_B", None)
        weight = merged.get(target)
        if b is None or weight is None or a.shape != (rank, weight.shape[1]) or b.shape != (weight.shape[0], rank):
            raise CheckpointError(
                f"{where}: {pair} does not fit {target} with rank {rank}: lora_A [rank, in], lora_B [out, rank]."
            )
        merged[target] = weight.float() + scale * (b.float() @ a.float())
    return merged


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
