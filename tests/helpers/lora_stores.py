"""Where tests without tensors load LoRA adapters into."""

from __future__ import annotations

from hamburger.model.checkpoints.sources import CheckpointError


class NamedFolders:
    """A LoraStore that only remembers paths. A path that ends with `bad` is no adapter."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}

    def load(self, number: int, path: str) -> None:
        if path.endswith("bad"):
            raise CheckpointError(f"{path} is no adapter.")
        self.loaded[number] = path

    def unload(self, number: int) -> None:
        del self.loaded[number]
