"""Loads every kind of checkpoint into one strict set of canonical tensors (tensor_shapes.py), and saves ours.

safetensors, or torch.load with weights_only=True; nothing else is ever read, and no code from a checkpoint runs.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hamburger.model.checkpoints.config.folder import FORMAT_VERSION, Adapter, read_folder_config
from hamburger.model.checkpoints.config.hf import read_trunk_config, trunk_config_json
from hamburger.model.checkpoints.experts import one_by_one
from hamburger.model.checkpoints.lazy_tensors import Lazy, LazyTensors, entries_of
from hamburger.model.checkpoints.lightning import load_lightning
from hamburger.model.checkpoints.quantised.methods import parse_quantisation, read_config
from hamburger.model.checkpoints.quantised.weights import idle_biases, unquantised
from hamburger.model.checkpoints.relatives.parts import check_tied_head
from hamburger.model.checkpoints.relatives.retelling import (
    has_retold_tensors,
    reads_images,
    retold_config,
    retold_tensors,
)
from hamburger.model.checkpoints.sources import BUILTIN, CheckpointError, ModelSource, embedded_gguf, own_files
from hamburger.model.checkpoints.weight_files import (
    INDEX,
    WEIGHTS,
    read_files,
    read_folder,
    write_safetensors,
)
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.tensor_shapes import shared_lora_a, tensor_shapes

_ADAPTER = "adapter."
# The trunk's linears, which alone may have an adapter.
_LINEAR = re.compile(r"(model\.layers\.\d+\.\w+\.\w+_proj|lm_head)\.weight")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's shape and all its tensors, by canonical name; checked to be complete."""

    config: ModelConfig
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """The same, of which tensors may not be made yet."""

    config: ModelConfig
    tensors: LazyTensors


def load_checkpoint(
    source: ModelSource, dtype: torch.dtype, *, on_progress: Callable[[str], None] = lambda line: None
) -> Checkpoint:
    """Read a model; floating tensors come in `dtype`. Raises CheckpointError that names the file, tensor or field."""
    found = open_checkpoint(source, dtype, on_progress=on_progress)
    return Checkpoint(found.config, dict(found.tensors))


def open_checkpoint(
    source: ModelSource, dtype: torch.dtype, *, on_progress: Callable[[str], None] = lambda line: None
) -> OpenCheckpoint:
    """As load_checkpoint; where a tensor has another dtype in its file, or is quantised there, it is made when it is
    asked for, which may raise CheckpointError, as any that holds no finite number."""
    try:
        if source.kind == "hamburger":
            found = _load_ours(source, dtype, on_progress)
        elif source.kind == "lightning":
            found = _as_they_are(*load_lightning(source))
        elif source.kind == "gguf":
            from hamburger.model.checkpoints.gguf_weights import load_gguf  # the library, for such files alone

            found = _as_they_are(*load_gguf(source.path, source.base_path, dtype, on_progress))
        else:
            found = _load_plain(source.path, dtype, on_progress)
    except ConfigError as error:
        raise CheckpointError(f"{source.path}: {error}") from error
    where = str(source.path)
    tensors = verified(found.config, found.tensors, where)
    served = {
        name: Lazy(tuple(about.shape), _served(about.dtype, dtype), partial(_finite, tensors, name, dtype, where))
        for name, about in tensors.entries.items()
    }
    return OpenCheckpoint(found.config, LazyTensors(served))


def _as_they_are(config: ModelConfig, tensors: Mapping[str, Tensor]) -> OpenCheckpoint:
    return OpenCheckpoint(config, LazyTensors(tensors))


def verified(config: ModelConfig, tensors: LazyTensors, where: str) -> LazyTensors:
    """Exactly the tensors that the shape asks for; a missing, extra or misshaped one raises CheckpointError."""
    left_out = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.trunk.tie_word_embeddings and "lm_head.weight" in tensors:
        left_out.add("lm_head.weight")
        check_tied_head(tensors, where)
    tensors = tensors.without(left_out)
    check_shapes(tensors.entries, tensor_shapes(config), where)
    for name, about in tensors.entries.items():
        if about.dtype != torch.int64 if name == "short_list" else not about.dtype.is_floating_point:
            raise CheckpointError(f"{where}: {name} has the dtype {about.dtype}, which a {name} cannot have.")
    ids = tensors.get("short_list")
    if ids is not None and not (
        ids.min() >= 0 and ids.max() < config.trunk.vocab_size and len(ids.unique()) == len(ids)
    ):
        raise CheckpointError(f"{where}: short_list must hold different ids of 0..{config.trunk.vocab_size - 1}.")
    return tensors


def _served(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if own.is_floating_point else own


def _finite(tensors: LazyTensors, name: str, dtype: torch.dtype, where: str) -> Tensor:
    """A tensor as it is served. Raises CheckpointError where a value is no finite number in that dtype."""
    tensor = tensors[name]
    tensor = tensor.to(_served(tensor.dtype, dtype))
    # A sum reads at the speed of memory, and is finite only if all are; one that overflows says nothing.
    if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
        raise CheckpointError(
            f"{where}: {name} holds numbers that are not finite in {str(dtype).removeprefix('torch.')}: the file is "
            "damaged, its training diverged, or dtype is too narrow."
        )
    return tensor


def check_shapes(tensors: Mapping[str, Tensor | Lazy], wanted: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises CheckpointError that names what is missing, unknown or misshaped."""
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted]
    misshaped = [
        f"{name} (is {list(tensors[name].shape)}, should be {list(shape)})"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = (("missing", missing), ("unknown", extra), ("misshaped", misshaped))
    if told := [f"{problem} tensors: {_few(names)}" for problem, names in problems if names]:
        raise CheckpointError(f"{where}: {'; '.join(told)}.")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def save_checkpoint(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    base: str | None = None,
    adapter: Adapter | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write our format: config.json and model.safetensors. Raises CheckpointError for tensors that do not fit.

    tensors: canonical tensors; with `base` (a folder, hub id or "builtin") only the graft's, and with `adapter`, which
    is to be merged, also `adapter.<linear>.lora_A` [rank, in] and `.lora_B` [out, rank]. One for composed slots is part
    of config and canonical tensors.
    max_file_bytes: more than that is written as shards with an index, as Hugging Face does.
    """
    settings: dict[str, Any] = {"model_type": "hamburger", "format_version": FORMAT_VERSION}
    settings |= {"trunk": trunk_config_json(config.trunk)} if base is None else {"base": base}
    if config.graft is not None:
        settings["graft"] = dataclasses.asdict(config.graft)
    if adapter is not None:
        settings["adapter"] = {"rank": adapter.rank, "alpha": adapter.alpha}
    elif config.adapter_rank:
        settings["adapter"] = {"rank": config.adapter_rank, "alpha": config.adapter_rank, "slots": "composed"}
    _check_own(config, tensors, base is not None, adapter, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    _save_tensors(folder, tensors, max_file_bytes)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in folder.glob("*.safetensors"):  # which the library lets only their owner read
        file.chmod((folder / "config.json").stat().st_mode)


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor], max_file_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = max_file_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = max_file_bytes
        shards[-1][name] = tensor.contiguous()
        room -= tensor.nbytes
    if len(shards) == 1:
        write_safetensors(folder / WEIGHTS, shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    metadata = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
    (folder / INDEX).write_text(index + "\n", encoding="utf-8")


def _load_ours(source: ModelSource, dtype: torch.dtype, on_progress: Callable[[str], None]) -> OpenCheckpoint:
    described = read_folder_config(source.path, base_is_referenced=source.base_path is not None)
    adapter = described.adapter
    is_merged = adapter is not None and not adapter.is_for_composed
    base = None
    if source.base_path is not None:
        # An adapter is merged in float32; without one the base comes in the dtype that is served.
        base = _load_base(source.base_path, torch.float32 if is_merged else dtype, on_progress)
    config = described.model(None if base is None else base.config.trunk)
    own = read_files(own_files(source.path))
    _check_own(config, own, base is not None, adapter, str(source.path))
    tensors = LazyTensors(own) if base is None else base.tensors | own
    if adapter is None:
        return OpenCheckpoint(config, tensors)
    if adapter.is_for_composed:
        return OpenCheckpoint(config, tensors | _for_merges(config, own, adapter, str(source.path)))
    plain = tensors.without({name for name in tensors if name.startswith(_ADAPTER)})
    return OpenCheckpoint(config, plain | _merged(tensors, adapter))


def _load_base(folder: Path, dtype: torch.dtype, on_progress: Callable[[str], None]) -> OpenCheckpoint:
    """A referenced base; a Hugging Face folder comes as `_load_plain` reads it."""
    if folder == BUILTIN:
        from hamburger.model.checkpoints.gguf_weights import load_gguf

        found = _as_they_are(*load_gguf(embedded_gguf(), BUILTIN, dtype, on_progress))
    else:
        found = _load_plain(folder, dtype, on_progress)
    return OpenCheckpoint(found.config, verified(found.config, found.tensors, str(folder)))


def _load_plain(folder: Path, dtype: torch.dtype, on_progress: Callable[[str], None]) -> OpenCheckpoint:
    """A Hugging Face folder, in its own dtype; weights that it holds quantised come in `dtype`, or in float32."""
    file = folder / "config.json"
    trunk, config = read_trunk_config(folder), read_config(folder)
    held: Mapping[str, Tensor] = read_folder(folder)
    quantisation = parse_quantisation(retold_config(config, str(file)), str(file))
    if quantisation is not None:
        on_progress(f"reading weights that are quantised ({quantisation.method})")
        # In float32 where they are multiplied: rounded before and after that, 4 bits would leave their grid.
        own = torch.float32 if has_retold_tensors(config, str(file)) else dtype
        held = unquantised(quantisation, held, own, str(folder))
    tensors = LazyTensors(entries_of(one_by_one(trunk, retold_tensors(config, held, str(file)))))
    if quantisation is not None and quantisation.method == "gptq":
        tensors = tensors.without(idle_biases(tensors, tensor_shapes(ModelConfig(trunk=trunk))))
    if reads_images(config):
        on_progress(
            f"this model reads images, but its text part alone is served: {len(tensors)} of {len(held)} tensors"
        )
    return OpenCheckpoint(ModelConfig(trunk=trunk), tensors)


def _check_own(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    base_is_referenced: bool,
    adapter: Adapter | None,
    where: str,
) -> None:
    """A folder of our format holds its graft, its trunk unless that is referenced, and whole adapter pairs."""
    trunk = tensor_shapes(ModelConfig(trunk=config.trunk))
    wanted = {n: s for n, s in tensor_shapes(config).items() if not (base_is_referenced and n in trunk)}
    adapted = {name.rpartition(".")[0] for name in tensors if name.startswith(_ADAPTER)}
    if adapter is not None and not adapted:
        raise CheckpointError(f"{where}: config.json has an adapter, but there are no tensors adapter.*.")
    if adapter is not None and not adapter.is_for_composed:
        rank = adapter.rank
        for pair in sorted(adapted):
            target = pair.removeprefix(_ADAPTER) + ".weight"
            if target in trunk and _LINEAR.fullmatch(target):
                wanted |= {f"{pair}.lora_A": (rank, trunk[target][1]), f"{pair}.lora_B": (trunk[target][0], rank)}
    check_shapes(tensors, wanted, where)


def _for_merges(config: ModelConfig, tensors: Mapping[str, Tensor], adapter: Adapter, where: str) -> dict[str, Tensor]:
    """The pairs with alpha / rank in lora_B. Raises CheckpointError where linears that are joined share no lora_A."""
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(_ADAPTER)}
    for name, shared in shared_lora_a(config).items():
        if not all(torch.equal(found[name], found[other]) for other in shared):
            raise CheckpointError(
                f"{where}: {name} and {', '.join(shared)} differ: an adapter for composed slots has one for all."
            )
    for name in (name for name in found if name.endswith(".lora_B")):
        found[name] = found[name] * (adapter.alpha / adapter.rank)
    return found


def _merged(tensors: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """W + alpha / rank * B A of every adapted linear, float32 (LoRA, arXiv 2106.09685)."""
    found = {}
    for name in (name for name in tensors if name.startswith(_ADAPTER) and name.endswith(".lora_A")):
        pair = name.removesuffix(".lora_A")
        target = pair.removeprefix(_ADAPTER) + ".weight"
        up = adapter.alpha / adapter.rank * tensors[f"{pair}.lora_B"].float()
        found[target] = torch.addmm(tensors[target].float(), up, tensors[name].float())
    return found
