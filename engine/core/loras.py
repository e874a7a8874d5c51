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
        """From any thread, also while a step runs: none names the number yet. One load at a time.

        Raises CheckpointError, whose message is fit for the user; nothing is loaded then.
        """

    def unload(self, number: int) -> None:
        """Between two steps."""


class CoreLoras:
    """An adapter that is unloaded stays until its last request has ended: an answer is one adapter's from beginning to
    end. It comes in three parts, of which the second may run in another thread:

    begin ── a place is kept ──► read ── its tensors are in the store ──► end ── requests may name it
    """

    def __init__(self, store: LoraStore, max_loras: int) -> None:
        """max_loras: most that are loaded at once, those included that stay for their requests."""
        self._store, self._max_loras = store, max_loras
        self._loaded: set[int] = set()
        self._leaving: set[int] = set()
        self._reading: int | None = None

    def begin(self, request: LoadLora) -> str | None:
        """Returns why there is no place for it; None: there is, until `end`. Only one has begun at a time."""
        if self._reading is not None:
            raise RuntimeError("a LoRA adapter was begun before the one before it had ended.")
        if len(self._loaded) >= self._max_loras:
            leaving = f", {len(self._leaving)} of them until their last requests end" if self._leaving else ""
            remedy = "unload one" if self._loaded - self._leaving else "wait for that"
            return (
                f"{len(self._loaded)} adapters are loaded{leaving}, and max_loras is {self._max_loras}: {remedy}, or "
                "raise it."
            )
        self._reading = request.number
        return None

    def read(self, request: LoadLora) -> str | None:
        """(any thread) Returns why it cannot be loaded; None: it is in the store."""
        try:
            self._store.load(request.number, request.path)
        except CheckpointError as error:
            return str(error)
        return None

    def end(self, number: int, error: str | None) -> None:
        """Between two steps, with what `read` returned: the adapter is there, or its place is free again."""
        self._reading = None
        if error is None:
            self._loaded.add(number)
        else:
            self._leaving.discard(number)

    def unload(self, request: UnloadLora) -> None:
        """Unknown numbers are ignored. One that is being read goes as soon as it has been."""
        if request.number in self._loaded or request.number == self._reading:
            self._leaving.add(request.number)

    def has(self, number: int) -> bool:
        return number in self._loaded

    def drop_unused(self, sequences: Iterable[Sequence]) -> None:
        """Forget what was unloaded and none of these sequences, which are all, uses."""
        if not self._leaving:
            return
        for number in self._leaving - {sequence.lora for sequence in sequences} - {self._reading}:
            self._store.unload(number)
            self._leaving.remove(number)
            self._loaded.remove(number)
