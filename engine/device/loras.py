"""LoraFolders: LoRA adapters from their folders to where the model's steps find them."""

from __future__ import annotations

from pathlib import Path

from hamburger.engine.types.errors import cut
from hamburger.model.checkpoints.lora_folder import base_config, read_lora
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource
from hamburger.model.config import TrunkConfig
from hamburger.model.device.out_of_memory import out_of_memory_reason
from hamburger.model.modules.lora import Loras


class LoraFolders:
    """A LoraStore (core/loras.py). max_rank: the highest of any adapter. source: of the model."""

    def __init__(self, loras: Loras, trunk: TrunkConfig, max_rank: int, source: ModelSource | None = None) -> None:
        self._loras, self._trunk, self._max_rank = loras, trunk, max_rank
        self._base = {} if source is None else base_config(source)

    def load(self, number: int, path: str) -> None:
        try:
            folder = Path(path).expanduser()
        except (RuntimeError, ValueError) as error:  # ~name of nobody, or with a character that no name has
            raise CheckpointError(f"{cut(path)} is no folder: {error}") from error
        try:
            weights = read_lora(folder, self._trunk, self._max_rank, self._base)
            self._loras.load(number, weights)
        except OSError as error:  # a name that is too long, or a folder that is not for us
            raise CheckpointError(f"{cut(path)} cannot be read: {error.strerror}.") from error
        except (RuntimeError, MemoryError) as error:
            if (reason := out_of_memory_reason(error)) is None:
                raise
            raise CheckpointError(f"Memory does not hold the adapter {cut(path)}: {reason}") from error

    def unload(self, number: int) -> None:
        self._loras.unload(number)
