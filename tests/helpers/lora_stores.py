"""Where tests without tensors load LoRA adapters into."""

from __future__ import annotations

import threading

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


class HeldFolders(NamedFolders):
    """One whose loads wait, each for a call of `let_through`; what began is told in order."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[str] = []
        self._begins, self._permits = threading.Semaphore(0), threading.Semaphore(0)

    def load(self, number: int, path: str) -> None:
        self.began.append(path)
        self._begins.release()
        if not self._permits.acquire(timeout=30):
            raise RuntimeError("nobody let it through")
        super().load(number, path)

    def wait_for_begin(self) -> None:
        """Until one more load waits in here."""
        assert self._begins.acquire(timeout=30)

    def let_through(self, number: int = 1) -> None:
        self._permits.release(number)
