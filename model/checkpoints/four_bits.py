"""Which linears of a checkpoint have 4 bits, which the CPU kernels keep (cpu/weights.py); none is read. No torch."""

from __future__ import annotations

from pathlib import Path

from hamburger.model.checkpoints.quantised.methods import parse_quantisation, read_config
from hamburger.model.checkpoints.sources import BUILTIN, ModelSource, embedded_gguf
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.tensor_shapes import JOINED, tensor_shapes

# The linears of an expert that are joined.
_OF_EXPERTS = (("gate_proj", "up_proj"), ("down_proj",))


def four_bit_linears(source: ModelSource, trunk: TrunkConfig) -> set[str]:
    """Canonical names of linears in the trunk's layers, of those that are joined all or none. Raises CheckpointError.

    A GGUF file says it of each tensor; a folder's configuration of all, whatever else its weights may say of some.
    """
    folder = source.base_path if source.kind == "hamburger" else source.path
    if source.kind == "gguf" or folder == BUILTIN:
        return _of_gguf(source.path if source.kind == "gguf" else embedded_gguf(), trunk)
    if folder is None or source.kind == "lightning":
        return set()
    found = parse_quantisation(read_config(folder), str(folder / "config.json"))
    if found is None or found.bits != 4 or found.reordered:
        return set()
    names = tensor_shapes(ModelConfig(trunk=trunk))
    return {name for name in names if name.startswith("model.layers.") and name.endswith("_proj.weight")}


def _of_gguf(path: Path, trunk: TrunkConfig) -> set[str]:
    from gguf import GGMLQuantizationType as Kind  # the library, for such files alone

    from hamburger.model.checkpoints.gguf_file import canonical_names, of_each_expert, open_gguf

    names = canonical_names(trunk)
    tensors = (tensor for tensor in open_gguf(path).tensors if tensor.tensor_type in (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K))
    kept = {names[tensor.name] for tensor in tensors if tensor.name in names}
    joined_as = [*JOINED.values(), *([f"mlp.experts.{part}" for part in parts] for parts in _OF_EXPERTS)]
    all_of = (
        {f"model.layers.{layer}.{part}.weight" for part in parts}
        for layer in range(trunk.num_layers)
        for parts in joined_as
    )
    number = 0 if trunk.experts is None else trunk.experts.number
    return {
        own
        for joined in all_of
        if joined <= kept
        for name in joined
        for own in (of_each_expert(name, number) if ".experts." in name else [name])
    }
