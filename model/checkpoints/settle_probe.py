"""The probe of settled slots (slot_choice.py): a small file beside the model whose keys it was fitted to."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hamburger.model.checkpoints.load import read_safetensors
from hamburger.model.checkpoints.sources import PROBE_FILE, CheckpointError, ModelSource
from hamburger.model.config import TrunkConfig

_TENSOR = "probe"


def load_probe(source: ModelSource, trunk: TrunkConfig) -> Tensor | None:
    """float32 [layers, kv_heads, head_dim + 1], from the model's folder (a file's), or its base's; None where there is
    none. Raises CheckpointError for one of another shape."""
    folder = source.path if source.path.is_dir() else source.path.parent
    for place in (folder, source.base_path):
        if place is not None and (file := place / PROBE_FILE).is_file():
            return read_probe(file, trunk)
    return None


def save_probe(file: Path, probe: Tensor) -> None:
    """Raises OSError."""
    save_file({_TENSOR: probe.float().contiguous()}, file)
    file.chmod(0o644)  # the library lets only its owner read it


def read_probe(file: Path, trunk: TrunkConfig) -> Tensor:
    """Raises CheckpointError."""
    probe = read_safetensors(file).get(_TENSOR)
    shape = (trunk.num_layers, trunk.num_kv_heads, trunk.head_dim + 1)
    if probe is None or probe.shape != shape or not bool(torch.isfinite(probe).all()):
        raise CheckpointError(
            f"{file} is no probe of this model, which is `{_TENSOR}` {list(shape)}, finite: make it with `hamburger "
            "fit-settle`, or remove it."
        )
    return probe.float()
