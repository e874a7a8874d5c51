"""What training starts from: a base or a HAMburger folder, with a graft and an adapter of the recipe's shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hamburger.model.checkpoints.config.folder import Adapter
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import (
    BUILTIN,
    EMBEDDED_BASE,
    ModelSource,
    own_files,
    read_json,
    resolve_source,
)
from hamburger.model.checkpoints.weight_files import read_files
from hamburger.model.config import ModelConfig
from hamburger.model.tensor_shapes import shared_lora_a, tensor_shapes
from hamburger.training.errors import TrainingError
from hamburger.training.forward.grafts import new_graft
from hamburger.training.recipe import Recipe

TRUNK_NAMES = ("model.", "lm_head.")  # what the trunk's canonical tensors begin with


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What training starts from, on the host in float32.

    tensors: canonical tensors, and `adapter.*` pairs. adapter: of these, unless they are for composed slots alone
    (config.adapter_rank). base: what a checkpoint names as its base, None if it holds its trunk. tokenizer: the folder
    whose tokenizer files go along.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    adapter: Adapter | None
    base: str | None
    tokenizer: Path


def read_base(name: str) -> Origin:
    """A base model. Raises CheckpointError, or TrainingError for one that cannot be a base."""
    source = resolve_source(name)
    if source.kind not in ("hf", "gguf") or (source.kind == "gguf" and name != EMBEDDED_BASE):
        raise TrainingError(f"base is {name}: it must be `builtin`, or a base model's folder or hub id.")
    checkpoint = load_checkpoint(source, torch.float32)
    is_folder = name != EMBEDDED_BASE and Path(name).expanduser().is_dir()
    named = str(source.path.resolve()) if is_folder else name
    return Origin(checkpoint.config, checkpoint.tensors, None, named, source.tokenizer_path)


def read_hamburger(name: str) -> Origin:
    """A HAMburger folder, its adapter not merged into the trunk. Raises CheckpointError or TrainingError."""
    source = resolve_source(name)
    if source.kind != "hamburger":
        raise TrainingError(f"init is {name}: it must be a folder of our format (`hamburger export` makes one).")
    checkpoint = load_checkpoint(source, torch.float32)
    if checkpoint.config.graft is None:
        raise TrainingError(f"init is {name}, which has no graft: name it as base.")
    settings = read_json(source.path / "config.json")
    base = _referenced(source, settings.get("base"))
    tensors, adapter = checkpoint.tensors, None
    if "adapter" in settings and not checkpoint.config.adapter_rank:
        adapter = Adapter(settings["adapter"]["rank"], float(settings["adapter"]["alpha"]))
        trunk = {} if base is None else read_base(base).tensors
        own = read_files(own_files(source.path))
        tensors = trunk | {n: t.float() if t.is_floating_point() else t for n, t in own.items()}
    # Aligned as new ones are: products of unaligned memory may round otherwise, and a run that goes on must not.
    aligned = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith(TRUNK_NAMES)}
    tensors = tensors | aligned
    return Origin(checkpoint.config, tensors, adapter, base, source.tokenizer_path)


def with_graft(origin: Origin, recipe: Recipe, short_list: Callable[[int], Tensor]) -> Origin:
    """The origin with a graft of the recipe's shape: a new one, or its own, which must have that shape.

    short_list: size -> the ids that micro-steps can give. Raises TrainingError, or ConfigError for a shape.
    """
    wanted = recipe.graft.config(origin.config.trunk)
    own = origin.config.graft
    if own is not None:
        for name in type(recipe.graft).model_fields:
            if getattr(own, name) != getattr(wanted, name):
                raise TrainingError(
                    f"graft.{name} is {getattr(wanted, name)} in the recipe, but {getattr(own, name)} in the model to "
                    "begin from: make them agree."
                )
        # What was measured on the weights to begin from no longer holds.
        own = replace(own, stop_scale=None, stop_bias=None, expected_tokens_per_kv=1.0)
        return replace(origin, config=replace(origin.config, graft=own))
    config = ModelConfig(trunk=origin.config.trunk, graft=wanted)
    ids = None if wanted.short_list_size is None else short_list(wanted.short_list_size)
    graft = new_graft(config, origin.tensors, ids, recipe.seed)
    return Origin(config, origin.tensors | graft, None, origin.base, origin.tokenizer)


def with_composed_adapter(origin: Origin, recipe: Recipe) -> Origin:
    """The origin with an adapter for composed slots: its own, which must have the recipe's rank, or a new one, which
    adds nothing yet. Raises TrainingError."""
    rank, own = recipe.trunk.rank, origin.config.adapter_rank
    if origin.adapter is not None or origin.base is None:
        raise TrainingError(
            "trunk.mode merges leaves the trunk to the base, but the model to begin from has changed it: begin from a "
            "graft over the untouched base."
        )
    if own:
        if own != rank:
            raise TrainingError(f"trunk.rank is {rank}, but the model to begin from has {own}: make them agree.")
        return origin
    config = replace(origin.config, adapter_rank=rank)
    shapes, generator = tensor_shapes(config), torch.Generator().manual_seed(recipe.seed)
    pairs = {name: torch.zeros(shape) for name, shape in shapes.items() if name.startswith("adapter.")}
    for name, shared in shared_lora_a(config).items():
        drawn = torch.randn(shapes[name], generator=generator) / shapes[name][1] ** 0.5
        pairs |= {part: drawn.clone() for part in (name, *shared)}
    return replace(origin, config=config, tensors=origin.tensors | pairs)


def _referenced(source: ModelSource, named: str | None) -> str | None:
    """The base that a folder names, in words that mean the same in another folder."""
    if source.base_path is None or named is None:
        return None
    if source.base_path == BUILTIN:
        return EMBEDDED_BASE
    is_folder = (source.path / named).is_dir() or Path(named).expanduser().is_dir()
    return str(source.base_path.resolve()) if is_folder else named
