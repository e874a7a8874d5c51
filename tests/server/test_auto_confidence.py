"""`--confidence auto` on a scripted engine: who follows the dial, and who is told what it chose."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fake_engines import fake_engine
from hamburger.engine.core.batch import BatchResult, ScheduledBatch
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.dial.confidence_dial import AutoConfidence
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.config import ConfigError
from serving import CHAT, MODEL, ByChoice, Served, serving

AUTO = AutoConfidence(target_seconds=0.001)  # less than any step takes
LONG = {"max_tokens": 200, "ignore_eos": True}


class Sized(ByChoice):
    """Groups of as many tokens as `size` says of their request's confidence; each step takes 50 ms of its own clock."""

    def __init__(self, size: Callable[[float], int]) -> None:
        super().__init__()
        self._size = size
        self.now = 0.0

    def run(self, batch: ScheduledBatch) -> BatchResult:
        self.now += 0.05
        return super().run(batch)

    def script(self, sequence: Sequence) -> list[int]:
        super().script(sequence)  # notes what was asked
        return [97] * self._size(sequence.params.confidence or 0)


class Held(Sized):
    """Its steps wait while `go_on` is cleared, and say that they have begun."""

    def __init__(self) -> None:
        super().__init__(larger)
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def run(self, batch: ScheduledBatch) -> BatchResult:
        self.began.set()
        self.go_on.wait(10)
        return super().run(batch)


class Stepped(Sized):
    """It runs as many steps as `allowed` has been released."""

    def __init__(self) -> None:
        super().__init__(larger)
        self.allowed = threading.Semaphore(0)

    def run(self, batch: ScheduledBatch) -> BatchResult:
        self.allowed.acquire(timeout=10)
        return super().run(batch)


def larger(confidence: float) -> int:
    return 1 if confidence > 0.75 else 2 if confidence > 0.65 else 3


@asynccontextmanager
async def with_dial(size: Callable[[float], int] = larger) -> AsyncIterator[tuple[Served, Sized]]:
    runner = Sized(size)
    async with serving(runner=runner, auto=AUTO, clock=lambda: runner.now) as server:
        yield server, runner


async def answers(server: Served, number: int) -> list[float]:
    """What the usage of so many answers says, one after the other."""
    return [(await server.complete(**LONG))["usage"]["confidence"] for _ in range(number)]


async def test_it_is_lowered_where_that_pays_and_told_in_usage_and_metrics() -> None:
    async with with_dial() as (server, runner):
        assert server.metric("confidence_in_force") == 0.8
        told = await answers(server, 8)
        assert told == sorted(told, reverse=True)
        assert set(told) == {0.8, 0.7, 0.6}
        assert server.runner.confidences == told
        assert server.metric("confidence_in_force") == 0.6
        runner.now += 5
        assert server.metric("confidence_in_force") == 0.7
        runner.now += 3600
        assert server.metric("confidence_in_force") == 0.8
        assert await answers(server, 1) == [0.8]


async def test_all_forms_of_an_answer_tell_it() -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "a", "max_output_tokens": 3},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    }
    async with with_dial() as (server, _):
        for path, body in asked.items():
            assert (await server.ok(path, body))["usage"]["confidence"] == server.runner.confidences[-1]
            told = (await server.post(path, {**body, "stream": True})).text
            assert f'"confidence":{server.runner.confidences[-1]}' in told


async def test_who_asks_during_a_long_step_does_not_take_it_for_idle_time() -> None:
    runner = Held()
    async with serving(runner=runner, auto=AUTO, clock=lambda: runner.now) as server:
        await answers(server, 8)
        runner.began.clear()
        runner.go_on.clear()
        answer = asyncio.create_task(server.complete(**LONG))
        assert await asyncio.to_thread(runner.began.wait, 10)
        runner.now += 3600
        assert server.metric("confidence_in_force") == 0.6
        runner.go_on.set()
        await answer


async def test_it_goes_back_where_that_does_not_pay() -> None:
    async with with_dial(lambda confidence: 1) as (server, _):
        told = await answers(server, 5)  # 10 s each; the next trial would come a minute after the first
        assert told == [0.8, 0.7, 0.6, 0.8, 0.8]  # neither shows anything, down to the bound
        assert server.metric("confidence_in_force") == 0.8


@pytest.mark.parametrize(
    ("fields", "headers", "confidence"),
    [
        ({"seed": 1}, {}, 0.8),
        ({"confidence": 0.33}, {}, 0.33),
        ({"confidence": 0.33, "seed": 1}, {}, 0.33),
        ({"model": f"{MODEL}@0.25"}, {}, 0.25),
        ({}, {"X-HAMburger-Confidence": "0.75"}, 0.75),
        ({}, {}, 0.6),
    ],
)
async def test_a_confidence_or_a_seed_keeps_a_request_off_the_dial(
    fields: dict[str, Any], headers: dict[str, str], confidence: float
) -> None:
    async with with_dial() as (server, _):
        await answers(server, 8)
        response = await server.post("/v1/completions", {"prompt": "ab", **fields}, headers=headers)
        assert response.json()["usage"]["confidence"] == confidence == server.runner.confidences[-1]


async def test_requests_that_it_does_not_choose_for_do_not_turn_it() -> None:
    async with with_dial() as (server, _):
        for fields in ({"seed": 1}, {"confidence": 0.8}) * 4:
            await server.complete(**LONG, **fields)
        assert server.metric("confidence_in_force") == 0.8


async def test_all_choices_have_one_value_and_a_stream_tells_it_too() -> None:
    async with with_dial() as (server, _):
        *_, last = await server.stream(CHAT, n=3, max_tokens=5, stream_options={"include_usage": True})
        assert last["usage"]["confidence"] == 0.8
        assert server.runner.confidences == [0.8] * 3


async def test_without_a_dial_the_usage_is_silent_and_the_gauge_has_the_default() -> None:
    async with serving([[97]] * 9) as server:
        assert "confidence" not in (await server.complete(max_tokens=3))["usage"]
        assert server.metric("confidence_in_force") == 0.8


async def test_an_answer_that_is_aborted_leaves_no_trace_in_the_dial() -> None:
    runner = Stepped()
    async with serving(runner=runner, auto=AUTO, clock=lambda: runner.now) as server:
        request = GenerationRequest("gone", [1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
        [stream] = server.engine.submit([request])
        assert stream.chosen_by_dial
        runner.allowed.release()
        async for _ in stream:
            break
        runner.allowed.release(1000)  # some steps still have it in them: the abort is on its way
        assert await answers(server, 1) == [0.8]


async def test_a_plain_base_is_refused_at_start() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="plain base model"):
        async with fake_engine(max_group=1, auto=AUTO):
            pass
    assert set(threading.enumerate()) <= before
