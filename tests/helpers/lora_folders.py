"""LoRA adapters on disk: written by PEFT on a transformers model, or with random numbers by ourselves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from hamburger.model.config import ModelConfig
from hamburger.model.tensor_shapes import JOINED, layer_shapes
from peer import hugging_face

LINEARS = tuple(part.rpartition(".")[2] for parts in JOINED.values() for part in parts)


def peft_folder(folder: Path, config: ModelConfig, tensors: dict[str, Tensor], seed: int, **fields: Any) -> Path:
    """What PEFT saves of an adapter with random weights, B's included. fields: of LoraConfig."""
    return saved_adapter(folder, hugging_face(config, tensors), seed, **fields)


def saved_adapter(folder: Path, peer: Any, seed: int, **fields: Any) -> Path:
    """The same on transformers' model, which has its layers then."""
    torch.manual_seed(seed)
    with _told_of_renamed_names():
        model: Any = get_peft_model(peer, LoraConfig(**fields))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def merged_peer(folder: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> Any:
    """transformers' model with the adapter merged into its weights by PEFT."""
    return merged_by_peft(hugging_face(config, tensors), folder)


def merged_by_peft(peer: Any, folder: Path) -> Any:
    """The same of transformers' model, whose weights change."""
    with _told_of_renamed_names():
        merged: Any = PeftModel.from_pretrained(peer, str(folder)).merge_and_unload()
    return merged.eval()


@contextmanager
def _told_of_renamed_names() -> Iterator[None]:
    """PEFT asks transformers by names that it has renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def lora_folder(
    folder: Path, config: ModelConfig, seed: int, rank: int = 8, names: tuple[str, ...] = LINEARS, **changes: Any
) -> Path:
    """As PEFT writes one. names: linears of every layer that have a part in it. changes: of adapter_config.json."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.trunk.num_layers):
        for name, shape in layer_shapes(config.trunk, layer).items():
            module = name.removesuffix(".weight")
            if ".experts." in name or not name.endswith("_proj.weight") or module.rpartition(".")[2] not in names:
                continue
            start = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[f"{start}A.weight"] = torch.randn(rank, shape[1], generator=generator) * shape[1] ** -0.5
            tensors[f"{start}B.weight"] = torch.randn(shape[0], rank, generator=generator) * 0.5 * rank**-0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*names], "bias": "none"} | changes
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def merged_tensors(folder: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's canonical tensors with an adapter of scaling 1 added to the trunk's."""
    found, pairs = dict(tensors), load_file(folder / "adapter_model.safetensors")
    for name, down in pairs.items():
        if name.endswith(".lora_A.weight"):
            start = name.removesuffix("A.weight")
            target = start.removeprefix("base_model.model.").removesuffix(".lora_") + ".weight"
            found[target] = found[target] + pairs[f"{start}B.weight"] @ down
    return found
