"""A HAMburger to train: a module with its trained parameters chosen, and back to the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from hamburger.model.assemble import model_of, parts_of
from hamburger.model.checkpoints.config.folder import Adapter
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.config import ModelConfig
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.tensor_shapes import shared_lora_a, tensor_shapes
from hamburger.training.errors import TrainingError
from hamburger.training.forward.network import is_for_composed
from hamburger.training.forward.origin import TRUNK_NAMES, Origin, with_composed_adapter
from hamburger.training.recipe import Recipe

Mode = Literal["frozen", "merges", "adapter", "full"]
ADAPTED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_LORA = {"lora_A": ".lora_A.default.weight", "lora_B": ".lora_B.default.weight"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


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
            tensors = {name: t for name, t in tensors.items() if not name.startswith(TRUNK_NAMES)}
        save_checkpoint(folder, config, tensors, base=self.base, adapter=self.adapter)
        for name in _TOKENIZER_FILES:
            if (self.tokenizer / name).is_file():
                (folder / name).write_bytes((self.tokenizer / name).read_bytes())


def build(
    origin: Origin, recipe: Recipe, *, device: torch.device, compute: torch.dtype, max_positions: int
) -> Trainable:
    """The module to train, for examples of up to max_positions tokens; linears that are not trained are in `compute`.

    Raises TrainingError when the origin's adapter does not fit the recipe.
    """
    mode = recipe.trunk.mode
    if mode == "merges":
        origin = with_composed_adapter(origin, recipe)
    elif mode != "frozen" and origin.config.adapter_rank:
        raise TrainingError(
            f"trunk.mode is {mode}, but the model to begin from has an adapter for composed slots alone: use "
            "trunk.mode merges or frozen."
        )
    tensors, adapter = origin.tensors, origin.adapter
    if mode == "full":
        tensors, adapter = _with_merged_adapter(origin), None
    elif mode == "adapter":
        chosen = Adapter(recipe.trunk.rank, recipe.trunk.alpha)
        if adapter is not None and adapter != chosen:
            raise TrainingError(
                f"trunk.rank and trunk.alpha are {chosen.rank} and {chosen.alpha}, but the model to begin from has an "
                f"adapter of {adapter.rank} and {adapter.alpha}: make them agree, or use trunk.mode full."
            )
        adapter = chosen
    has_own_adapter = bool(origin.config.adapter_rank)  # else peft's modules take the pairs
    plain = {name: t for name, t in tensors.items() if has_own_adapter or not name.startswith("adapter.")}
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
    """A module's state dict -> canonical tensors (tensor_shapes.py) and `adapter.*` pairs, float32 on the host.

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
        found = [pair for pair in pairs if f"{pair}.lora_A" in tensors]
        if not found:
            continue
        down = [tensors[f"{pair}.lora_A"] for pair in found]
        if len(found) < len(pairs) or not all(torch.equal(a, down[0]) for a in down):
            raise TrainingError(
                f"the adapters of {', '.join(parts)} do not share one lora_A, so they cannot be trained on: merge them "
                "with `hamburger export`, or use trunk.mode full."
            )
        parameters[linear + _LORA["lora_A"]].data.copy_(down[0])
        parameters[linear + _LORA["lora_B"]].data.copy_(torch.cat([tensors[f"{pair}.lora_B"] for pair in pairs]))


def _with_merged_adapter(origin: Origin) -> dict[str, Tensor]:
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
    """Whether the recipe's objective leaves untrained what its mode would train: for composed slots or micro-steps."""
    if is_for_composed(name):
        return recipe.groups.kind == "single" or recipe.objective.stop_target == "fidelity"
    return is_graft(name) and recipe.objective.micro_weight == 0
