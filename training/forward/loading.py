"""A checkpoint as a model that a command of this folder runs itself: to score texts, regroup or calibrate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hamburger.model.assemble import model_of
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import ModelSource
from hamburger.model.cpu.onednn import can_pack, packed_linear
from hamburger.model.device.devices import choose_device, choose_dtype
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.linear import plain_linear


def load_model(
    source: ModelSource,
    *,
    device: str,
    dtype: str,
    packed: bool = False,
    state_dtype: torch.dtype | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> HamburgerModel:
    """The model, for sequences as long as its trunk's context. device and dtype may be `auto`.

    packed: linears in oneDNN's form where that can be had, for inference only. state_dtype: of the states that its
    rotary tables turn; None is dtype.

    Raises CheckpointError or ConfigError.
    """
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    checkpoint = load_checkpoint(source, kind, on_progress=on_progress)
    length = checkpoint.config.trunk.fixed_context_tokens
    return model_of(
        checkpoint.config,
        checkpoint.tensors,
        dtype=kind,
        device=where,
        max_positions=length,
        linear=packed_linear if packed and can_pack(kind, where) else plain_linear,
        state_dtype=state_dtype,
    )
