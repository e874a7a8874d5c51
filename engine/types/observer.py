"""What AsyncEngine reports to whoever measures: steps, groups that reach their requests, and how each request ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from hamburger.engine.types.messages import StepStats
from hamburger.engine.types.sampling_params import SamplingParams

EndReason = Literal["stop", "length", "abort", "error", "timeout"]  # timeout: it waited too long, for nothing


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """time.monotonic() seconds; None where the request never got that far."""

    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float


class EngineObserver(Protocol):
    """What the metrics listen to; called on the event loop, must not block."""

    def on_step(self, stats: StepStats) -> None:
        """A step ended. One that computed nothing (no prompt slots, no decoded sequences) only reports the state."""

    def on_group(self, gap_seconds: float | None, num_tokens: int) -> None:
        """A group reached its request; gap_seconds since its previous group, None for the first."""

    def on_start(self, prompt_tokens: int, timings: RequestTimings, lora: str | None) -> None:
        """A request's first group reached it, before on_group; timings.finished is now."""

    def on_finish(
        self,
        reason: EndReason,
        params: SamplingParams,
        prompt_tokens: int,
        completion_tokens: int,
        timings: RequestTimings,
        lora: str | None,
    ) -> None:
        """A request ended. completion_tokens: those that its caller got. lora: the adapter that it named."""
