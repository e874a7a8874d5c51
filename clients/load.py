"""Sends streamed requests to an OpenAI-compatible server and times what comes back, closed loop or open loop.

Decides nothing about figures (figures.py) or arguments (bench.py). The reading loop is kept short, because on a small
machine the client shares its cores with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import httpx

from hamburger.clients.connection import Clients, check_stream, is_stream, silent, transport_error
from hamburger.clients.figures import Answer
from hamburger.clients.wire import RequestError, StreamDecoder

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_GRACE_SECONDS = 0.1  # for a connection to end its answer: it mostly has


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every request of a level asks for, greedy. A field that is None or False is left out of the request."""

    model: str
    endpoint: Literal["chat", "completions"]
    output_tokens: int
    confidence: float | None = None
    ignore_eos: bool = False
    groups: bool = True
    cache_salt: str | None = None  # keeps the prefix cache of a server that knows it to requests of the same

    def body(self, prompt: str | list[int]) -> dict[str, Any]:
        """The JSON of one request. Token ids are a prompt of the completions endpoint only."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}
        return {
            "model": self.model,
            **asked,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"confidence": self.confidence} if self.confidence is not None else {}),
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"return_groups": True} if self.groups else {}),
            **({"cache_salt": self.cache_salt} if self.cache_salt is not None else {}),
        }


def allow_many_connections() -> None:
    """Let this process open as many files as the system allows it, where it has such a limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names a limit that it refuses
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def ask(client: httpx.AsyncClient, job: Job, prompt: str | list[int]) -> Answer:
    """Send one request and read its answer to the end. A failure is the answer's `error`, never an exception."""
    decoder = StreamDecoder()
    clock = time.perf_counter
    answer = Answer(clock())
    try:
        async with client.stream("POST", PATHS[job.endpoint], json=job.body(prompt)) as response:
            if not is_stream(response):
                await response.aread()
            check_stream(response)
            chunks, heard = response.aiter_bytes(), answer.started
            async for chunk in chunks:
                now = clock()
                for event in decoder.feed(chunk):
                    answer.add(event, now)
                    heard = now
                if decoder.is_done:
                    break
                if now - heard > (client.timeout.read or math.inf):  # pings alone
                    raise silent(client.base_url)
            for event in decoder.close():
                answer.add(event, clock())
            answer.ended = clock()
            await _read_out(chunks)
        if not answer.completion_tokens or answer.first is None:
            answer.error = "the answer has no tokens"
    except RequestError as error:
        answer.error, answer.remedy = error.reason, error.remedy
    except httpx.HTTPError as error:
        failure = transport_error(error, client.base_url)
        answer.error, answer.remedy = failure.reason, failure.remedy
    answer.ended = answer.ended or clock()
    return answer


async def _read_out(chunks: AsyncIterator[bytes]) -> None:
    """What is behind a whole answer, so that its connection serves the next request; one that does not end is left."""
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_GRACE_SECONDS):
            async for _ in chunks:
                pass


async def closed_loop(
    clients: Clients, job: Job, prompts: Sequence[str], concurrency: int, on_end: Callable[[], object]
) -> list[Answer]:
    """Keep `concurrency` requests in flight until every prompt was answered. Calls `on_end` after each."""
    waiting = iter(prompts)
    answers = []

    async def worker() -> None:
        async with clients.one() as client:
            for prompt in waiting:
                answers.append(await ask(client, job, prompt))
                on_end()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(worker())
    return answers


async def open_loop(
    clients: Clients, job: Job, prompts: Sequence[str], offsets: Sequence[float], on_end: Callable[[], object]
) -> list[Answer]:
    """Send prompt i `offsets[i]` seconds after the start, however many are in flight."""
    start = time.perf_counter()

    async def send(prompt: str, offset: float) -> Answer:
        await asyncio.sleep(start + offset - time.perf_counter())
        async with clients.one() as client:
            answer = await ask(client, job, prompt)
        on_end()
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(prompt, offset)) for prompt, offset in zip(prompts, offsets, strict=True)]
    return [task.result() for task in tasks]


def poisson_offsets(number: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start to each of `number` arrivals of a Poisson process of `rate` per second; the first is 0.

    The last is at (number - 1) / rate: a few random gaps have another mean than they should, and a server would seem
    not to keep up.
    """
    rng = random.Random(seed)
    sums = list(accumulate((rng.expovariate(1) for _ in range(number - 1)), initial=0.0))
    return [(number - 1) / rate * at / (sums[-1] or 1) for at in sums]
