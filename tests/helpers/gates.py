"""What holds a scripted engine's steps up, so that a test decides when each runs."""

from __future__ import annotations

import threading
from typing import Protocol


class Gate(Protocol):
    """Holds a runner's steps up. A threading.Event is one, StepGate another."""

    def wait(self) -> object: ...
    def set(self) -> None:
        """Let everything through from now on."""


class StepGate:
    """A gate that lets one step through for each call of `step`."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def wait(self) -> None:
        if not self._is_open:
            self._permits.acquire()

    def step(self) -> None:
        self._permits.release()

    def set(self) -> None:
        self._is_open = True
        self._permits.release()
