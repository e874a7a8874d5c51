"""What `hamburger fit-settle` finds out for settled slots: a small file beside the model that it was fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hamburger.model.checkpoints.settle_settings import probe_file
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource
from hamburger.model.checkpoints.weight_files import read_safetensors, write_safetensors
from hamburger.model.config import TrunkConfig


class SettleProbe(NamedTuple):
    """weights: float32 [layers, kv_heads, head_dim + 1] (slot_choice.py). shares: int64 [layers, kv_heads], of how many
    heads' places a head has (settled_places.py); all 1 in a file without any."""

    weights: Tensor
    shares: Tensor


def load_probe(source: ModelSource, trunk: TrunkConfig) -> SettleProbe | None:
    """From the model's folder (a file's), or its base's; None where there is none. Raises CheckpointError for one of
    another shape."""
    file = probe_file(source)
    return None if file is None else read_probe(file, trunk)


def equal_shares(trunk: TrunkConfig) -> Tensor:
    """Each head has its own places."""
    return torch.ones(trunk.num_layers, trunk.num_kv_heads, dtype=torch.int64)


def save_probe(file: Path, probe: SettleProbe, settings: Mapping[str, float] | None = None) -> None:
    """settings: that suit it (settle_settings.py); None names none. Raises OSError."""
    tensors = {"probe": probe.weights.float().contiguous(), "shares": probe.shares.contiguous()}
    write_safetensors(file, tensors, {name: str(value) for name, value in (settings or {}).items()})
    file.chmod(0o644)  # the library lets only its owner read it


def read_probe(file: Path, trunk: TrunkConfig) -> SettleProbe:
    """Raises CheckpointError."""
    tensors = read_safetensors(file)
    weights, shares = tensors.get("probe"), tensors.get("shares", equal_shares(trunk))
    shape = (trunk.num_layers, trunk.num_kv_heads, trunk.head_dim + 1)
    if weights is None or weights.shape != shape or not bool(torch.isfinite(weights).all()):
        raise CheckpointError(
            f"{file} is no probe of this model, which is `probe` {list(shape)}, finite: make it with `hamburger "
            "fit-settle`, or remove it."
        )
    if shares.shape != shape[:2] or shares.dtype != torch.int64 or not _can_be_lent(shares):
        raise CheckpointError(
            f"{file} has `shares` that are not those of this model: whole numbers {list(shape[:2])} from 0 on, and no "
            "more borrowed than lent. Make it anew with `hamburger fit-settle`, or remove it."
        )
    return SettleProbe(weights.float(), shares)


def _can_be_lent(shares: Tensor) -> bool:
    return bool((shares >= 0).all()) and int((shares - 1).clamp(min=0).sum()) <= int((shares == 0).sum())
