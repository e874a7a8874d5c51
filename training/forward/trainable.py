"""A HAMburger to train: a module with its trained parameters chosen, and back to the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from hamburger.model.assemble import model_of, parts_of
from hamburger.model.checkpoints.folder_config import Adapter
from hamburger.model.checkpoints.load import load_checkpoint, read_files, save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN, EMBEDDED_BASE, ModelSource, read_json, resolve_source
from hamburger.model.config import ModelConfig, shared_lora_a, tensor_shapes
from hamburger.model.hamburger import HamburgerModel
from hamburger.training.errors import TrainingError
from hamburger.training.forward.grafts import new_graft
from hamburger.training.forward.network import is_of_merges
from hamburger.training.recipe import Recipe

Mode = Literal["frozen", "merges", "adapter", "full"]
ADAPTED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_TRUNK = ("model.", "lm_head.")
_LORA = {"lora_A": ".lora_A.default.weight", "lora_B": ".lora_B.default.weight"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What training starts from, on the host in float32.

    tensors: canonical tensors, and `adapter.*` pairs. adapter: of these, unless they are for merged slots alone
    (config.adapter_rank). base: what a checkpoint names as its base,
    None if it holds its trunk. tokenizer: the folder whose tokenizer files go along.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    adapter: Adapter | None
    base: str | None
    tokenizer: Path


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """A module whose parameters with requires_grad are trained, and how its checkpoints are written."""

    model: HamburgerModel
    adapter: Adapter | None
    base: str | None
    tokenizer: Path

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that can be served; state: the model's state dict, gathered."""
        config = self.model.config
        tensors = canonical_tensors(config, state)
        if self.base is not None:
            tensors = {name: t for name, t in tensors.items() if not name.startswith(_TRUNK)}
        save_checkpoint(folder, config, tensors, base=self.base, adapter=self.adapter)
        for name in _TOKENIZER_FILES:
            if (self.tokenizer / name).is_file():
                (folder / name).write_bytes((self.tokenizer / name).read_bytes())


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
    """A HAMburger folder, its adapter unmerged. Raises CheckpointError or TrainingError."""
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
        own = read_files(sorted(source.path.glob("*.safetensors")))
        tensors = trunk | {n: t.float() if t.is_floating_point() else t for n, t in own.items()}
    # Aligned as new ones are: products of unaligned memory may round otherwise, and a run that goes on must not.
    aligned = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith(_TRUNK)}
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


def _with_merge_adapter(origin: Origin, recipe: Recipe) -> Origin:
    """The origin with an adapter for merged slots: its own, which must have the recipe's rank, or a new one, which adds
    nothing yet. Raises TrainingError."""
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


def build(
    origin: Origin, recipe: Recipe, *, device: torch.device, compute: torch.dtype, max_positions: int
) -> Trainable:
    """The module to train, for examples of up to max_positions tokens; linears that are not trained are in `compute`.

    Raises TrainingError when the origin's adapter does not fit the recipe.
    """
    mode = recipe.trunk.mode
    if mode == "merges":
        origin = _with_merge_adapter(origin, recipe)
    elif mode != "frozen" and origin.config.adapter_rank:
        raise TrainingError(
            f"trunk.mode is {mode}, but the model to begin from has an adapter for merged slots alone: use trunk.mode "
            "merges or frozen."
        )
    tensors, adapter = origin.tensors, origin.adapter
    if mode == "full":
        tensors, adapter = _merged(origin), None
    elif mode == "adapter":
        chosen = Adapter(recipe.trunk.rank, recipe.trunk.alpha)
        if adapter is not None and adapter != chosen:
            raise TrainingError(
                f"trunk.rank and trunk.alpha are {chosen.rank} and {chosen.alpha}, but the model to begin from has an "
                f"adapter of {adapter.rank} and {adapter.alpha}: make them agree, or use trunk.mode full."
            )
        adapter = chosen
    is_held = bool(origin.config.adapter_rank)  # else peft's modules take the pairs
    plain = {name: t for name, t in tensors.items() if is_held or not name.startswith("adapter.")}
    model = model_of(origin.config, plain, dtype=torch.float32, device=device, max_positions=max_positions)
    if adapter is not None:
        _inject(model, adapter, recipe.trunk.dropout, recipe.seed)
        if origin.adapter is not None:
            _load_adapter(model, tensors)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_trained(name, mode) and not _is_left(name, recipe))
    for module in model.modules():
        # Embedding and norms stay float32, and so does the residual stream.
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            module.weight.data = module.weight.data.to(compute)
    return Trainable(model, adapter, None if mode == "full" else origin.base, origin.tokenizer)


def is_graft(name: str) -> bool:
    """Whether a parameter of HamburgerModel belongs to the graft."""
    return name.startswith(("embedder.", "micro_decoder.", "stop_head."))


def canonical_tensors(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's state dict -> canonical tensors (config.tensor_shapes) and `adapter.*` pairs, float32 on the host.

    A fused linear's adapter becomes one pair for each of its parts: A is shared, B is cut by rows.
    """
    shapes = tensor_shapes(config)
    tensors: dict[str, Tensor] = {}
    for name, parts in parts_of(config).items():
        linear, _, kind = name.rpartition(".")
        rows = [shapes[part][0] for part in parts]
        joined = state[name] if name in state else state[f"{linear}.base_layer.{kind}"]
        tensors |= {part: _host(t) for part, t in zip(parts, joined.split(rows), strict=True)}
        if kind == "weight" and linear + _LORA["lora_A"] in state:
            up = state[linear + _LORA["lora_B"]].split(rows)
            for part, b in zip(parts, up, strict=True):
                pair = f"adapter.{part.removesuffix('.weight')}"
                tensors[f"{pair}.lora_A"] = _host(state[linear + _LORA["lora_A"]])
                tensors[f"{pair}.lora_B"] = _host(b)
    for name, shared in shared_lora_a(config).items() if config.adapter_rank else ():
        tensors |= {part: tensors[name].clone() for part in shared}
    return tensors


def _host(tensor: Tensor) -> Tensor:
    """A copy of its own: safetensors writes no tensors that share memory."""
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _inject(model: HamburgerModel, adapter: Adapter, dropout: float, seed: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model  # imports transformers: seconds that other modes need not wait

    settings = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # it only divides
        lora_dropout=dropout,
        target_modules=list(ADAPTED),
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model.trunk.layers)


def _load_adapter(model: HamburgerModel, tensors: Mapping[str, Tensor]) -> None:
    """Canonical `adapter.*` pairs -> the module's. Raises TrainingError when the parts of a fused linear disagree."""
    parameters = dict(model.named_parameters())
    for name, parts in parts_of(model.config).items():
        linear = name.removesuffix(".weight")
        if linear + _LORA["lora_A"] not in parameters:
            continue
        pairs = [f"adapter.{part.removesuffix('.weight')}" for part in parts]
        held = [pair for pair in pairs if f"{pair}.lora_A" in tensors]
        if not held:
            continue
        down = [tensors[f"{pair}.lora_A"] for pair in held]
        if len(held) < len(pairs) or not all(torch.equal(a, down[0]) for a in down):
            raise TrainingError(
                f"the adapters of {', '.join(parts)} do not share one lora_A, so they cannot be trained on: merge them "
                "with `hamburger export`, or use trunk.mode full."
            )
        parameters[linear + _LORA["lora_A"]].data.copy_(down[0])
        parameters[linear + _LORA["lora_B"]].data.copy_(torch.cat([tensors[f"{pair}.lora_B"] for pair in pairs]))


def _merged(origin: Origin) -> dict[str, Tensor]:
    tensors = {n: t for n, t in origin.tensors.items() if not n.startswith("adapter.")}
    if origin.adapter is None:
        return tensors
    scale = origin.adapter.alpha / origin.adapter.rank
    for name in (n for n in origin.tensors if n.endswith(".lora_A")):
        pair = name.removesuffix(".lora_A")
        weight = pair.removeprefix("adapter.") + ".weight"
        tensors[weight] = tensors[weight] + scale * (origin.tensors[f"{pair}.lora_B"] @ origin.tensors[name])
    return tensors


def _is_trained(name: str, mode: Mode) -> bool:
    if mode == "merges" and "_adapter." in name:
        return True
    return mode == "full" or is_graft(name) or (mode == "adapter" and ".lora_" in name)


def _is_left(name: str, recipe: Recipe) -> bool:
    """Whether the recipe leaves a parameter of the graft as it is."""
    if is_of_merges(name):
        return recipe.groups.kind == "single" or recipe.objective.stop_target == "fidelity"
    return is_graft(name) and recipe.objective.micro_weight == 0


def _referenced(source: ModelSource, named: str | None) -> str | None:
    """The base that a folder names, in words that mean the same in another folder."""
    if source.base_path is None or named is None:
        return None
    if source.base_path == BUILTIN:
        return EMBEDDED_BASE
    is_folder = (source.path / named).is_dir() or Path(named).expanduser().is_dir()
    return str(source.base_path.resolve()) if is_folder else named
