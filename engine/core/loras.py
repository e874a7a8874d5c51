"""CoreLoras: which LoRA adapters are loaded, and for how long. It reads no files and knows no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.messages import LoadLora, UnloadLora
from hamburger.model.checkpoints.sources import CheckpointError


class LoraStore(Protocol):
    """Where adapters are loaded into: those that the runner's batches may name."""

    def load(self, number: int, path: str) -> None:
        """Raises CheckpointError, whose message is fit for the user."""

    def unload(self, number: int) -> None: ...


class CoreLoras:
    """An adapter that is unloaded stays until its last request has ended: an answer is one adapter's from beginning to
    end."""

    def __init__(self, store: LoraStore, max_loras: int) -> None:
        """max_loras: most that are loaded at once, those included that stay for their requests."""
        self._store, self._max_loras = store, max_loras
        self._loaded: set[int] = set()
        self._leaving: set[int] = set()

    def load(self, request: LoadLora) -> str | None:
        """Returns why it was not loaded; None: it was."""
        if len(self._loaded) >= self._max_loras:
            leaving = f", {len(self._leaving)} of them until their last requests end" if self._leaving else ""
            return (
                f"{len(self._loaded)} adapters are loaded{leaving}, and max_loras is {self._max_loras}: unload one, or "
                "raise it."
            )
        try:
            self._store.load(request.number, request.path)
        except CheckpointError as error:
            return str(error)
        self._loaded.add(request.number)
        return None

    def unload(self, request: UnloadLora) -> None:
        """Unknown numbers are ignored."""
        if request.number in self._loaded:
            self._leaving.add(request.number)

    def has(self, number: int) -> bool:
        return number in self._loaded

    def drop_unused(self, sequences: Iterable[Sequence]) -> None:
        """Forget what was unloaded and none of these sequences, which are all, uses."""
        if not self._leaving:
            return
        for number in self._leaving - {sequence.lora for sequence in sequences}:
            self._store.unload(number)
            self._leaving.remove(number)
            self._loaded.remove(number)
