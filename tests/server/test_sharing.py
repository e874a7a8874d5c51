"""What requests share and compete for: cached prompts in the usage, salts between tenants, priorities."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes import EOS
from gates import StepGate
from serving import CHAT, COMPLETIONS, ByChoice, Served, serving, until

CACHED: dict[str, Any] = {"prefix_cache": True, "block_size": 4}
PROMPT = list(range(1, 12))  # two full blocks of four


def cached_tokens(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_the_usage_says_what_was_cached() -> None:
    async with serving([[1, 2], [EOS]], **CACHED) as server:
        first = await server.complete(prompt=PROMPT)
        again = await server.complete(prompt=PROMPT)
        chunks = await server.stream(COMPLETIONS, prompt=PROMPT, stream_options={"include_usage": True})
        assert [cached_tokens(first), cached_tokens(again), cached_tokens(chunks[-1])] == [0, 8, 8]
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert server.metric("prefix_cache_queries_total") == 33
        assert server.metric("prefix_cache_hits_total") == 16


async def test_choices_of_one_prompt_do_not_count_what_they_computed_themselves() -> None:
    async with serving([[1, 2], [EOS]], **CACHED, max_num_seqs=1) as server:
        assert cached_tokens(await server.complete(prompt=PROMPT, n=3)) == 0
        assert cached_tokens(await server.complete(prompt=PROMPT, n=3)) == 8
        assert cached_tokens(await server.complete(prompt=[PROMPT, PROMPT])) == 16


async def test_only_the_same_salt_shares() -> None:
    async with serving([[EOS]], **CACHED) as server:
        found = [
            cached_tokens(await server.complete(prompt=PROMPT, **salt))
            for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {"cache_salt": None})
        ]
    assert found == [0, 0, 0, 8, 8]


@pytest.mark.parametrize("salt", ["", "x" * 257, 7])
async def test_a_salt_that_is_none(salt: Any) -> None:
    async with serving() as server:
        status, error = await server.refused(CHAT, {"messages": [], "cache_salt": salt})
    assert (status, error["param"]) == (400, "cache_salt")


class Order(ByChoice):
    """Notes the priorities of requests as they emit their first group."""

    def __init__(self, gate: StepGate) -> None:
        super().__init__([[1], [EOS]], gate=gate)
        self.started: list[int] = []

    def script(self, sequence: Any) -> list[int]:
        if not sequence.groups:
            self.started.append(sequence.priority)
        return super().script(sequence)


async def test_lower_goes_first() -> None:
    gate = StepGate()
    runner = Order(gate)
    async with serving(runner=runner, max_num_seqs=1) as server:
        asked = []
        for number, priority in enumerate((0, 7, None, -3), start=1):
            asked.append(asyncio.create_task(server.complete(priority=priority)))
            await until(lambda number=number: _known(server, number))  # type: ignore[misc]
        gate.set()
        await asyncio.gather(*asked)
    # The first one was in its step when the others came; the urgent one then took its seat.
    assert runner.started == [0, -3, 0, 7]


def _known(server: Served, number: int) -> bool:
    """Whether the engine has so many requests, and the first of them is in its step."""
    health = server.engine.health()
    return health.num_running + health.num_waiting >= number and health.seconds_in_step is not None


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.5, "high", True])
async def test_a_priority_that_is_none(priority: Any) -> None:
    async with serving() as server:
        status, error = await server.refused(COMPLETIONS, {"prompt": "a", "priority": priority})
    assert (status, error["param"]) == (400, "priority")
