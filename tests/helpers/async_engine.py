"""What tests of AsyncEngine ask of it and hear from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hamburger.engine.request import GenerationRequest, RequestUpdate
from hamburger.engine.request_stream import RequestStream
from hamburger.engine.types.messages import StepStats
from hamburger.engine.types.observer import EndReason, RequestTimings
from hamburger.engine.types.sampling_params import SamplingParams

LONG = SamplingParams(seed=0, ignore_eos=True)


def request(name: str, params: SamplingParams = LONG, prompt_ids: list[int] | None = None) -> GenerationRequest:
    return GenerationRequest(name, prompt_ids or [1, 2, 3], params)


async def collect(stream: RequestStream) -> list[RequestUpdate]:
    return [update async for update in stream]


async def until(condition: Callable[[], bool]) -> None:
    """Give the engine thread and the event loop time until something is so."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nothing tells what is waited for here
            await asyncio.sleep(0.001)


class Recorder:
    """An EngineObserver that remembers what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.groups: list[tuple[float | None, int]] = []
        self.starts: list[tuple[int, RequestTimings, str | None]] = []
        self.ends: list[tuple[str, int, int, RequestTimings]] = []

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_group(self, gap_seconds: float | None, num_tokens: int) -> None:
        self.groups.append((gap_seconds, num_tokens))

    def on_start(self, prompt_tokens: int, timings: RequestTimings, lora: str | None) -> None:
        self.starts.append((prompt_tokens, timings, lora))

    def on_finish(
        self,
        reason: EndReason,
        params: SamplingParams,
        prompt_tokens: int,
        completion_tokens: int,
        timings: RequestTimings,
        lora: str | None,
    ) -> None:
        self.ends.append((reason, prompt_tokens, completion_tokens, timings))
