"""A checkpoint as a model that a command of this folder runs itself: to score texts, regroup or calibrate."""

from __future__ import annotations

from collections.abc import Callable

from hamburger.model.assemble import assemble
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import ModelSource
from hamburger.model.device.devices import choose_device, choose_dtype
from hamburger.model.execution import Execution
from hamburger.model.hamburger import HamburgerModel


def load_model(
    source: ModelSource,
    *,
    device: str,
    dtype: str,
    packed: bool | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> HamburgerModel:
    """The model, for sequences as long as its trunk's context. device and dtype may be `auto`; packed as for assemble.

    Raises CheckpointError or ConfigError.
    """
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    checkpoint = load_checkpoint(source, kind, on_progress=on_progress)
    length = checkpoint.config.trunk.fixed_context_tokens
    return assemble(
        checkpoint.config,
        checkpoint.tensors,
        dtype=kind,
        device=where,
        max_positions=length,
        how=Execution(packed=packed),
    )
