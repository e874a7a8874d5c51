"""A GGUF file's own table of its tensors, and their canonical names. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.tensor_shapes import tensor_shapes

# What llama.cpp calls an architecture -> transformers' model_type.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}
_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")

_MOST_VALUES = 4_000_000  # of a list in the metadata: vocabularies have some hundred thousand
_BROKEN = (OSError, ValueError, LookupError, ArithmeticError, TypeError, RecursionError)  # what broken files end in


class GgufReader(gguf.GGUFReader):
    """The library's, in a third of the time: it takes a vocabulary out of the file in a quarter of a million slices,
    and those of a memmap are dear. And a list has an end, also behind the file's."""

    @property
    def data(self) -> Any:
        """The file's bytes, mapped."""
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            [number] = self._get(orig_offs + 4, np.uint64).tolist()
            if number > _MOST_VALUES:
                raise ValueError(f"a list of {number} values")
        return super()._get_field_parts(orig_offs, raw_type)


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Raises CheckpointError."""
    try:
        return GgufReader(path)
    except _BROKEN as error:
        raise CheckpointError(f"{path} is not a whole GGUF file: {error}") from error


def of_each_expert(name: str, number: int) -> list[str]:
    """Canonical names of single experts, of what canonical_names has for all of them."""
    return [name.replace(".experts.", f".experts.{n}.") for n in range(number)]


def value_of(path: Path, field: gguf.ReaderField) -> Any:
    """What the file says there. Raises CheckpointError where that is no text or number."""
    try:
        return field.contents()
    except _BROKEN as error:
        raise CheckpointError(f"{path}: {field.name} cannot be read: {error}") from error


def canonical_names(trunk: TrunkConfig) -> dict[str, str]:
    """The file's name of each canonical tensor -> that; of all experts of a layer, which are one tensor there, without
    their number."""
    architecture = next(theirs for theirs, ours in ARCHITECTURES.items() if ours == trunk.architecture)
    of_library = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(of_library, trunk.num_layers)
    ours = {_OF_ONE_EXPERT.sub(".experts.", name): None for name in tensor_shapes(ModelConfig(trunk=trunk))}
    found = ((names.get_name(name, (".weight", ".bias")), name) for name in ours)
    return {theirs: name for theirs, name in found if theirs is not None}
