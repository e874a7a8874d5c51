"""Reads safetensors files: one, several, and those of a Hugging Face folder; and writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from hamburger.model.checkpoints.sources import CheckpointError, read_json

_LFS = b"version https://git-lfs."
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder: one file, or the shards that the index names. The one file where there are
    both, as transformers reads it: a model that was saved over a larger one leaves that one's index."""
    if (folder / WEIGHTS).is_file() or (folder / WEIGHTS).is_symlink():
        return read_safetensors(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        has_shards = any(folder.glob("model-*-of-*.safetensors"))
        what = "its shards need their index" if has_shards else "only safetensors weights are read"
        raise CheckpointError(f"{folder} has no {WEIGHTS} and no {INDEX}: {what}.")
    files = read_json(folder / INDEX).get("weight_map")
    names = list(files.values()) if isinstance(files, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{folder / INDEX}: weight_map must give a file of the folder for each tensor.")
    return read_files([folder / name for name in sorted(set(names))])


def read_files(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of several safetensors files; one that is there twice is a CheckpointError."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = read_safetensors(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(f"{file}: {twice[0]} is in another file of the folder too.")
        tensors |= found
    return tensors


def read_safetensors(path: Path, *, mapped: bool = True) -> dict[str, Tensor]:
    """A file's tensors. mapped: they lie in the file, and who cuts that ends this process; else in memory.

    Raises CheckpointError when it is truncated or no safetensors file.
    """
    try:
        return load_file(path) if mapped else dict(sorted(load(path.read_bytes()).items()))  # as load_file has them
    except (SafetensorError, OSError, ValueError) as error:
        if path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path} is a link to a file that is not there: fetch the model again.") from error
        if _is_pointer(path):
            raise CheckpointError(
                f"{path} is a pointer of Git LFS, not the file: fetch it by `git lfs pull`."
            ) from error
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _is_pointer(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS
    return False


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Contiguous tensors to a file, over one that is there. Raises OSError, as on a full disk."""
    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
