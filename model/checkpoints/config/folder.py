"""What a model's files say about its shape: config.json, never the weights. No torch, but for GGUF files.

Our own folders are read here, Hugging Face's in hf.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hamburger.model.checkpoints.config.hf import parse_trunk_config, read_trunk_config
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource, read_json
from hamburger.model.config import ConfigError, GraftConfig, ModelConfig, TrunkConfig

FORMAT_VERSION = 1
_CONFIG_KEYS = {"model_type", "format_version", "trunk", "base", "graft", "adapter"}


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank adapters on the trunk's linears; they add alpha / rank * B A to a weight.

    is_for_composed: slots of several tokens alone pass them (modules/adapter.py); else the weights take them in.
    """

    rank: int
    alpha: float
    is_for_composed: bool = False


@dataclass(frozen=True, slots=True)
class FolderConfig:
    """config.json of our format. trunk: None where a base is referenced."""

    trunk: TrunkConfig | None
    graft: GraftConfig | None
    adapter: Adapter | None

    def model(self, base: TrunkConfig | None) -> ModelConfig:
        """The whole model's shape; base: the trunk that is referenced."""
        trunk = base if self.trunk is None else self.trunk
        if trunk is None:
            raise CheckpointError("config.json refers to a base, which was not found.")
        rank = self.adapter.rank if self.adapter is not None and self.adapter.is_for_composed else 0
        return ModelConfig(trunk=trunk, graft=self.graft, adapter_rank=rank)


def read_folder_config(folder: Path, *, base_is_referenced: bool) -> FolderConfig:
    """Raises CheckpointError that names the field which is missing, unknown or wrong."""
    where = str(folder / "config.json")
    settings = read_json(folder / "config.json")
    if unknown := sorted(set(settings) - _CONFIG_KEYS):
        raise CheckpointError(f"{where}: unknown keys: {', '.join(unknown)}.")
    if settings.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format_version is {settings.get('format_version')!r}; this version reads {FORMAT_VERSION}."
        )
    if ("trunk" in settings) == base_is_referenced:
        raise CheckpointError(f"{where}: it must have a trunk or name a base, one of the two.")
    adapter = _adapter(settings.get("adapter"), where)
    trunk = None if base_is_referenced else _with_end_tokens(settings["trunk"], folder, where)
    return FolderConfig(trunk, _graft(settings.get("graft"), where), adapter)


def read_model_config(source: ModelSource) -> ModelConfig:
    """The shape of a whole model. Raises CheckpointError."""
    try:
        if source.kind == "hf":
            return ModelConfig(trunk=read_trunk_config(source.path))
        if source.kind == "gguf":
            return ModelConfig(trunk=_gguf_trunk(source))
        if source.kind == "lightning":
            raise CheckpointError(
                f"{source.path} does not say its shape without its weights: export it as a folder (hamburger export)."
            )
        described = read_folder_config(source.path, base_is_referenced=source.base_path is not None)
        return described.model(None if source.base_path is None else read_trunk_config(source.base_path))
    except ConfigError as error:
        raise CheckpointError(f"{source.path}: {error}") from error


def _gguf_trunk(source: ModelSource) -> TrunkConfig:
    if source.base_path is not None:
        return read_trunk_config(source.base_path)
    from hamburger.model.checkpoints.gguf_weights import read_gguf_config  # it imports torch

    return read_gguf_config(source.path)


def _with_end_tokens(trunk: Any, folder: Path, where: str) -> TrunkConfig:
    """The trunk of our config.json; generation_config.json's end tokens win, as in a Hugging Face folder."""
    if not isinstance(trunk, dict):
        raise CheckpointError(f"{where}: trunk must be an object.")
    path = folder / "generation_config.json"
    end = read_json(path).get("eos_token_id") if path.is_file() else None
    return parse_trunk_config(trunk if end is None else {**trunk, "eos_token_id": end}, where)


def _graft(fields: Any, where: str) -> GraftConfig | None:
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where}: graft must be an object.")
    if unknown := sorted(set(fields) - {f.name for f in dataclasses.fields(GraftConfig)}):
        raise CheckpointError(f"{where}: graft has unknown keys: {', '.join(unknown)}.")
    numbers: dict[str, tuple[type, ...]] = {"micro_norm": (bool,), "short_list_size": (int, type(None))}
    numbers |= dict.fromkeys(("max_group", "merger_heads", "micro_layers"), (int,))
    numbers |= dict.fromkeys(("default_confidence", "expected_tokens_per_kv"), (int, float))
    for name, kinds in numbers.items():
        if name in fields and type(fields[name]) not in kinds:
            raise CheckpointError(f"{where}: graft.{name} is {fields[name]!r}, which is not {kinds[0].__name__}.")
    if fields.get("features", "positions") not in ("positions", "fused"):
        raise CheckpointError(f"{where}: graft.features is {fields['features']!r}: it must be positions or fused.")
    if fields.get("groups", "composed") not in ("composed", "verified"):
        raise CheckpointError(f"{where}: graft.groups is {fields['groups']!r}: it must be composed or verified.")
    layers = fields.get("feature_layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(f"{where}: graft.feature_layers is {layers!r}: it must be a list of layers.")
    calibration = {name: fields.get(name) for name in ("stop_scale", "stop_bias")}
    for name, values in calibration.items():
        if values is not None:
            if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
                raise CheckpointError(f"{where}: graft.{name} is {values!r}: it must be a list of numbers.")
            calibration[name] = tuple(values)
    try:
        return GraftConfig(**{**fields, **calibration, "feature_layers": tuple(layers)})
    except TypeError as error:  # a field is missing
        raise CheckpointError(f"{where}: graft: {error}.") from error


def _adapter(fields: Any, where: str) -> Adapter | None:
    if fields is None:
        return None
    if not isinstance(fields, dict) or not {"rank", "alpha"} <= set(fields) <= {"rank", "alpha", "slots"}:
        raise CheckpointError(f"{where}: adapter must be an object of rank and alpha, and slots where not all pass it.")
    rank, alpha, slots = fields["rank"], fields["alpha"], fields.get("slots", "all")
    if slots not in ("all", "composed"):
        raise CheckpointError(f"{where}: adapter.slots is {slots!r}: it must be all or composed.")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise CheckpointError(f"{where}: adapter needs a rank of at least 1 and a number alpha.")
    return Adapter(rank, float(alpha), slots == "composed")
