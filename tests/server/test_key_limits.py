"""What one API key may take of the server, and that keys share it fairly."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import httpx
import pytest

from gates import StepGate
from hamburger.engine.queue_room import ClientLoad
from hamburger.engine.types.errors import InvalidRequest, RateLimited
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.operation.key_limits import KeyLimits
from hamburger.server.operation.middleware import RATE_LIMITS
from serving import COMPLETIONS, ByChoice, Served, error_of, serving, until

KEYS: dict[str, Any] = {"api_key": "first,second"}
OWNERS = [hashlib.sha256(key).hexdigest() for key in (b"first", b"second")]
FIRST, SECOND = {"Authorization": "Bearer first"}, {"Authorization": "Bearer second"}


class FakeEngine:
    """num_open and num_without_token are the same for every key."""

    def __init__(self, num_open: int = 0, num_without_token: int = 0, max_queue: int = 10, free_seats: int = 0) -> None:
        self.load = ClientLoad(num_open, num_without_token, max_queue, free_seats, seats=4)

    def load_of(self, client: str) -> ClientLoad:
        return self.load

    def retry_after(self, num_requests: int) -> int:
        return 10 + num_requests


def limits(clock: Any = lambda: 0.0, **settings: Any) -> KeyLimits:
    return KeyLimits(ServeSettings(**KEYS, **settings), clock)


def check(limits: KeyLimits, *engines: FakeEngine, number: int = 1, key: str = "1") -> None:
    limits.check(key, number, "n", engines[0], engines)


def refused(limits: KeyLimits, *engines: FakeEngine, number: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        check(limits, *engines, number=number)
    return caught.value


def test_requests_at_once_count_in_all_models_together() -> None:
    of = limits(key_requests=4)
    check(of, FakeEngine(2), FakeEngine(1))
    error = refused(of, FakeEngine(2), FakeEngine(1), number=3)
    assert str(error) == "This API key has 3 of at most 4 requests at once (key_requests): try again later."
    assert error.retry_after == 12  # when two more have left
    check(of, FakeEngine(9), key="")  # no key, no limit
    with pytest.raises(InvalidRequest, match="asks for 5 answers, but a key may have 4 at once"):
        check(of, FakeEngine(), number=5)


def test_tokens_come_back_evenly_over_a_minute() -> None:
    now = [100.0]
    of = limits(lambda: now[0], key_tokens_per_minute=600)
    check(of, FakeEngine())
    of.spend("1", 599)
    check(of, FakeEngine())  # an answer may go beyond what is left
    of.spend("1", 101)
    error = refused(of, FakeEngine())
    assert error.retry_after == 11
    assert "used its 600 tokens a minute (key_tokens_per_minute): try again in 11 s" in str(error)
    check(of, FakeEngine(), key="2")
    now[0] += error.retry_after - 1
    assert refused(of, FakeEngine()).retry_after == 1
    now[0] += 1
    check(of, FakeEngine())
    now[0] += 3600  # nobody saves up more than a minute's
    assert of.tokens_left("1") == 600


def test_headers_say_what_is_left_of_the_tokens() -> None:
    now = [100.0]
    of = limits(lambda: now[0], key_tokens_per_minute=600)
    assert list(of.headers("1")) == list(RATE_LIMITS)
    assert list(of.headers("1").values()) == ["600", "600", "0.000s"]
    of.spend("1", 150)
    now[0] += 0.25
    assert list(of.headers("1").values()) == ["600", "452", "14.750s"]
    of.spend("1", 500)
    assert of.headers("1")["X-RateLimit-Remaining-Tokens"] == "0"
    assert of.headers("") == limits().headers("1") == {}


def test_a_share_of_the_queue_beside_the_free_seats() -> None:
    of = limits(key_queue_share=0.3)
    check(of, FakeEngine(num_without_token=2))
    error = refused(of, FakeEngine(num_without_token=2), number=3)
    assert "2 requests of this API key wait, which is its share of the queue (key_queue_share)" in str(error)
    assert error.retry_after == 12
    check(of, FakeEngine(num_without_token=2, free_seats=2), number=3)
    assert refused(of, FakeEngine(), number=7).retry_after == 14
    with pytest.raises(
        InvalidRequest, match="asks for 8 answers, but a key may have 7 at once"
    ):  # it would try for ever
        check(of, FakeEngine(free_seats=4), number=8)
    check(limits(), FakeEngine(num_without_token=99))


@pytest.mark.parametrize("name", ["key_requests", "key_tokens_per_minute", "key_queue_share"])
def test_limits_of_keys_need_keys(name: str) -> None:
    given: dict[str, Any] = {name: 1 if name != "key_queue_share" else 0.5}
    with pytest.raises(SettingsError, match=f"^{name} is given, but there are no API keys"):
        ServeSettings(**given).api_keys()
    assert ServeSettings(**given, **KEYS).api_keys() == ["first", "second"]


async def post(server: Served, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return await server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 3, **fields}, headers=headers)


async def test_a_key_at_its_limit_is_a_429_and_others_are_not() -> None:
    gate = StepGate()
    settings = KEYS | {"key_requests": 2}
    async with serving(runner=ByChoice([[97]] * 9, gate=gate), settings=settings) as server:
        running = asyncio.create_task(post(server, FIRST, n=2))
        await until(lambda: server.engine.load_of(OWNERS[0]).num_open == 2)
        response = await post(server, FIRST)
        error = error_of(response)
        assert (response.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        assert server.metric("request_failure_total", code="429", reason="rate_limit_exceeded") == 1
        assert server.metric("request_failure_total", reason="queue_full") == 0  # for which the operator is called
        other = asyncio.create_task(post(server, SECOND))
        gate.set()
        assert (await running).status_code == (await other).status_code == 200
        assert (await post(server, FIRST, n=2)).status_code == 200
        for fields, field in (
            ({"n": 3}, "n"), ({"best_of": 3}, "best_of"), ({"prompt": ["a", "b", "c"]}, "prompt"),
        ):  # fmt: skip
            response = await post(server, FIRST, **fields)
            assert (response.status_code, error_of(response)["param"]) == (400, field)


async def test_who_leaves_is_not_counted_any_more() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97]] * 9, gate=gate), settings=KEYS | {"key_requests": 1}) as server:
        leaving = asyncio.create_task(post(server, FIRST))
        await until(lambda: server.engine.load_of(OWNERS[0]).num_open == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: server.engine.load_of(OWNERS[0]).num_open == 0)
        gate.set()
        assert (await post(server, FIRST)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_and_answers_are_spent(stream: bool) -> None:
    async with serving([[97], [98], [99]], settings=KEYS | {"key_tokens_per_minute": 10}) as server:
        # 3 tokens of the prompt, which two choices share, and 3 of each answer: 9, then 15 of 10.
        answer = await post(server, FIRST, n=2, stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-tokens"] == "10"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) in (range(1, 8) if stream else (1, 2))
        assert (await post(server, FIRST, stream=stream)).status_code == 200
        response = await post(server, FIRST, stream=stream)
        assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
        assert 25 <= int(response.headers["retry-after"]) <= 31
        assert (await post(server, SECOND)).status_code == 200


async def test_a_request_that_is_refused_spends_nothing() -> None:
    settings = KEYS | {"key_tokens_per_minute": 9}
    async with serving([[97], [98], [99]], settings=settings, max_model_len=8) as server:
        for _ in range(3):
            assert (await post(server, FIRST, prompt="abcdefghij")).status_code == 400
        assert (await post(server, FIRST)).status_code == 200


async def test_priority_can_be_forbidden() -> None:
    async with serving([[97]], settings={"allow_priority": False}) as server:
        status, error = await server.refused(COMPLETIONS, {"prompt": "ab", "priority": -1})
        assert (status, error["param"]) == (400, "priority")
        await server.complete(priority=0)


async def test_one_key_with_many_requests_does_not_delay_anothers() -> None:
    gate = StepGate()
    ended: list[str] = []

    async def ask(name: str, headers: dict[str, str]) -> None:
        assert (await post(server, headers)).status_code == 200
        ended.append(name)

    async with serving(runner=ByChoice([[97]] * 9, gate=gate), settings=KEYS, max_num_seqs=1) as server:
        tasks = [asyncio.create_task(ask(f"first {i}", FIRST)) for i in range(5)]
        await until(lambda: server.engine.load_of(OWNERS[0]).num_open == 5)
        tasks.append(asyncio.create_task(ask("second", SECOND)))
        await until(lambda: server.engine.load_of(OWNERS[1]).num_open == 1)
        gate.set()
        await asyncio.gather(*tasks)
    assert sorted(ended) == ["first 0", "first 1", "first 2", "first 3", "first 4", "second"]
    assert ended.index("second") <= 2  # one ran, and one may have been next before the core knew of it
