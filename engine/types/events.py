"""What the engine's loop reports, and the messages that it takes. Plain values: they may cross processes."""

from __future__ import annotations

from dataclasses import dataclass

from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.messages import (
    AbortRequest,
    EngineInfo,
    LoadLora,
    LoraLoaded,
    StepOutputs,
    SubmitRequest,
    UnloadLora,
)


@dataclass(frozen=True, slots=True)
class Stop:
    """AsyncEngine -> loop: give up what is unfinished and end."""


Message = SubmitRequest | AbortRequest | LoadLora | UnloadLora | Stop


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The core is built."""

    info: EngineInfo
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step begins after a pause. time: time.monotonic() seconds."""

    time: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step. received: the numbers of the requests that the core was given since the last report.

    time: time.monotonic() seconds when it ended. goes_on: the next one begins at once, and sends no StepStarted.
    """

    outputs: StepOutputs
    received: list[int]
    time: float
    goes_on: bool


LoopEvent = EngineReady | StepStarted | StepReport | LoraLoaded


@dataclass(frozen=True, slots=True)
class EngineStopped:
    """The engine has ended. error: what building or stepping raised; None when it was asked to stop."""

    error: BaseException | None


Event = LoopEvent | EngineStopped
