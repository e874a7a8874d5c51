"""The published checkpoint format: a PyTorch Lightning `.ckpt` -> canonical names. It is never unpickled freely.

The file holds neither the trunk's geometry nor the tokenizer, so the trunk's configuration comes from its base.
"""

from __future__ import annotations

import re
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - only the error that torch.load(weights_only=True) raises
from typing import Any

import torch
from torch import Tensor

from hamburger.model.checkpoints.config.hf import read_trunk_config
from hamburger.model.checkpoints.relatives.retelling import has_retold_tensors
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource, read_json
from hamburger.model.config import GraftConfig, ModelConfig, TrunkConfig

# The published training code builds the merger with 64 heads whatever the trunk has, and reads 4 feature layers.
_MERGER_HEADS = 64
_NUM_FEATURES = 4

_PREFIXES = {
    "model.": "",  # a LlamaForCausalLM: model.model.*, model.lm_head.weight
    "comp_embedder.merger.": "embedder.",
    "comp_embedder.out_proj.": "embedder.out_proj.",
    "micro_step_decoder.decoders.": "micro_decoder.layers.",
    "micro_step_decoder.stop_head.": "stop_head.",
}
_TIED = "comp_embedder.embedding.weight"


def load_lightning(source: ModelSource) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and canonically named tensors as the file holds them, not yet checked. Raises CheckpointError."""
    path = source.path
    if source.base_path is None:
        raise CheckpointError(f"{path} does not hold the trunk's geometry: name its base model with --base.")
    trunk = read_trunk_config(source.base_path)
    base = source.base_path / "config.json"
    if has_retold_tensors(config := read_json(base), str(base)):
        raise CheckpointError(
            f"{base}: model_type is {config.get('model_type')!r}, but the published format is known of Llamas and what "
            "is computed as one from the weights as they are: is --base the right one?"
        )
    state, hyper = _read(path)
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith("teacher.") or name == _TIED:  # the distillation's teacher is no part of the model
            continue
        prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
        # A name of none of these parts stays as it is, for the strict check to report.
        tensors[name if prefix is None else _PREFIXES[prefix] + name.removeprefix(prefix)] = tensor
    embedding = tensors.get("model.embed_tokens.weight")
    if _TIED in state and (embedding is None or not torch.equal(state[_TIED], embedding)):
        raise CheckpointError(f"{path}: {_TIED} differs from the trunk's embedding, which it should be tied to.")
    return ModelConfig(trunk=trunk, graft=_graft(path, trunk, hyper, tensors)), tensors


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint that loads without running code (torch.load with weights_only=True): "
            f"{str(error).splitlines()[0]}"
        ) from error
    parts = checkpoint if isinstance(checkpoint, dict) else {}
    state, hyper = parts.get("state_dict"), parts.get("hyper_parameters")
    if not isinstance(state, dict) or not isinstance(hyper, dict):
        raise CheckpointError(f"{path} is no Lightning checkpoint: it needs state_dict and hyper_parameters.")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: state_dict entry {name!r} is not a named tensor.")
    return state, hyper


def _graft(path: Path, trunk: TrunkConfig, hyper: dict[str, Any], tensors: dict[str, Tensor]) -> GraftConfig:
    max_group = hyper.get("max_steps")
    if type(max_group) is not int:
        raise CheckpointError(f"{path}: hyper_parameters.max_steps is {max_group!r}: it must be the group's limit.")
    if trunk.num_layers % _NUM_FEATURES:
        raise CheckpointError(
            f"{path}: the published format reads {_NUM_FEATURES} evenly spaced layers, and the base has "
            f"{trunk.num_layers}, which is not a multiple of {_NUM_FEATURES}: is --base the right one?"
        )
    step = trunk.num_layers // _NUM_FEATURES
    found = [re.match(r"micro_decoder\.layers\.(\d+)\.", name) for name in tensors]
    return GraftConfig(
        max_group=max_group,
        merger_heads=_MERGER_HEADS,
        micro_layers=max((int(match[1]) + 1 for match in found if match), default=1),
        feature_layers=tuple(range(step - 1, trunk.num_layers, step)),
    )
