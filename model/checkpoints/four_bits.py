"""Which linears of a checkpoint have 4 bits, which the CPU kernels keep (cpu/weights.py); none is read. No torch."""

from __future__ import annotations

from pathlib import Path

from hamburger.model.checkpoints.quantised.methods import parse_quantisation
from hamburger.model.checkpoints.sources import BUILTIN, ModelSource, embedded_gguf, read_json
from hamburger.model.config import TrunkConfig
from hamburger.model.tensor_shapes import JOINED


def four_bit_linears(source: ModelSource, trunk: TrunkConfig) -> set[str]:
    """Canonical names of linears in the trunk's layers, of those that are joined all or none. Raises CheckpointError.

    A GGUF file says it of each tensor; a folder's configuration of all, whatever else its weights may say of some.
    """
    folder = source.base_path if source.kind == "hamburger" else source.path
    all_of = [
        {f"model.layers.{layer}.{part}.weight" for part in parts}
        for layer in range(trunk.num_layers)
        for parts in JOINED.values()
    ]
    if source.kind == "gguf" or folder == BUILTIN:
        kept = _of_gguf(source.path if source.kind == "gguf" else embedded_gguf(), trunk)
    elif folder is None or source.kind == "lightning":
        kept = set()
    else:
        found = parse_quantisation(read_json(folder / "config.json"), str(folder / "config.json"))
        is_kept = found is not None and found.bits == 4 and not found.reordered
        kept = set().union(*all_of) if is_kept else set()
    return set().union(*(joined for joined in all_of if joined <= kept))


def _of_gguf(path: Path, trunk: TrunkConfig) -> set[str]:
    from gguf import GGMLQuantizationType as Kind  # the library, for such files alone

    from hamburger.model.checkpoints.gguf_file import canonical_names, open_gguf

    names = canonical_names(trunk)
    tensors = (tensor for tensor in open_gguf(path).tensors if tensor.tensor_type in (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K))
    return {names[tensor.name] for tensor in tensors if tensor.name in names}
