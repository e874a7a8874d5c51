"""Two replicas on Ray Serve: the same surface, streams, sessions, and one that dies or is replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from hamburger.server.config import ServeSettings
from ray_cluster import Cluster, engine_of, wait_until_gone
from serving import CHAT, COMPLETIONS, error_of, events

pytestmark = [pytest.mark.scale, pytest.mark.timeout(900)]


@dataclass
class Streamed:
    """One streamed answer as far as it has come."""

    lines: list[str]
    has_ended: bool = False

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(line.removeprefix("data: ")) for line in self.lines if line != "data: [DONE]"]

    @property
    def error(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.chunks[-1].get("error")
        return found

    @property
    def text(self) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in self.chunks if "choices" in chunk)


def body(number: int, **fields: Any) -> dict[str, Any]:
    """A greedy completion that ends by its length."""
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields
    return {"prompt": f"{number} friends went to the", **fields}


async def stream_into(streamed: Streamed, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    async with client.stream("POST", COMPLETIONS, json={**fields, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                streamed.lines.append(line)
    streamed.has_ended = True


async def text_of(client: httpx.AsyncClient, fields: dict[str, Any]) -> str:
    response = await client.post(COMPLETIONS, json=fields)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds, asked in a thread; fails after 120 s."""
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.02)


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.url, timeout=300)


def test_the_surface_is_ours(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        assert client.get("/health").json()["status"] == "ok"
        assert client.get("/ready").json()["status"] == "ready"
        model = client.get("/v1/models").json()["data"][0]["id"]
        chat = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        answer = client.post(CHAT, json=chat, headers={"X-Request-Id": "mine"})
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert answer.headers["x-request-id"] == "mine"
        found = events(client.post(CHAT, json={**chat, "stream": True, "stream_options": {"include_usage": True}}).text)
        assert found[-1]["usage"]["completion_tokens"] == 4
        refused = client.post(CHAT, json={**chat, "max_tokens": 0})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "max_tokens")
        assert client.post(CHAT, json={**chat, "model": "other"}).status_code == 404
        assert error_of(client.get("/nothing"))["message"] == "There is nothing at /nothing."
        too_large = client.post(
            COMPLETIONS,
            content=b" " * (ServeSettings().max_body_size + 1),
            headers={"Content-Type": "application/json"},
        )
        assert too_large.status_code == 413
        assert client.post("/tokenize", json={"prompt": "a b"}).json()["count"] > 0
        assert CHAT in client.get("/openapi.json").json()["paths"]
    assert set(cluster.running()) == set(cluster.replicas())


async def test_streams_come_in_pieces_and_a_client_that_leaves_frees_its_seat(cluster: Cluster) -> None:
    async with client_of(cluster) as client:
        pieces = 0
        async with client.stream("POST", COMPLETIONS, json=body(1, max_tokens=400, stream=True)) as response:
            async for _ in response.aiter_raw():
                pieces += 1
                if pieces == 5:
                    assert sum(cluster.running().values()) == 1  # it is not finished: 5 pieces came while it ran
                    break
        await until(lambda: not sum(cluster.running().values()))
    assert not cluster.has_logged("can no longer be watched")


async def test_a_session_stays_at_one_replica(cluster: Cluster) -> None:
    async def where(client: httpx.AsyncClient, session: str, number: int) -> str:
        """The replica whose count of requests grows."""
        before = await finished(client)
        await client.post(COMPLETIONS, json=body(number, max_tokens=1), headers={"X-Session-Id": session})
        after = await finished(client)
        (name,) = [name for name in after if after[name] > before[name]]
        return name

    async def finished(client: httpx.AsyncClient) -> dict[str, float]:
        page = (await client.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("hamburger_request_prompt_tokens_count{")]
        return {line.split('engine="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    async with client_of(cluster) as client:
        by_session = {
            session: {await where(client, session, number) for number in range(3)} for session in map(str, range(8))
        }
    assert all(len(names) == 1 for names in by_session.values())
    assert len(set.union(*by_session.values())) == 2


async def test_a_stored_response_is_found_wherever_it_lies(cluster: Cluster) -> None:
    cluster.wait_for_replicas(2)
    places = set()
    async with client_of(cluster) as client:
        for number in range(8):
            wish = {"input": f"Count to {number}.", "max_output_tokens": 8, "background": True}
            name = (await client.post("/v1/responses", json=wish)).json()["id"]
            places.add(name.rpartition("_")[2])

            def is_written(name: str = name) -> bool:
                asked = httpx.get(f"{cluster.url}/v1/responses/{name}", timeout=60)
                assert asked.status_code == 200, asked.text
                return bool(asked.json()["status"] != "in_progress")

            await until(is_written)
            more = {"input": "And on?", "previous_response_id": name, "max_output_tokens": 4}
            assert (await client.post("/v1/responses", json=more)).status_code == 200
            assert (await client.delete(f"/v1/responses/{name}")).status_code == 200
            assert (await client.get(f"/v1/responses/{name}")).status_code == 404
    assert places == set(cluster.replicas())


async def test_a_replica_killed_under_load_loses_nothing_that_had_not_begun(cluster: Cluster) -> None:
    replicas = cluster.wait_for_replicas(2)
    async with client_of(cluster) as client:
        expected = [await text_of(client, body(number)) for number in range(12)]
        streams = [Streamed([]) for _ in range(6)]
        bodies = [body(100 + number, max_tokens=200) for number in range(len(streams))]
        pairs = zip(streams, bodies, strict=True)
        tasks = [asyncio.create_task(stream_into(streamed, client, fields)) for streamed, fields in pairs]
        await until(lambda: all(streamed.lines for streamed in streams))
        begun = await asyncio.to_thread(cluster.running)
        victim = max(begun, key=lambda name: begun[name])
        assert begun[victim] > 0
        whole = [asyncio.create_task(text_of(client, body(number))) for number in range(len(expected))]
        await until(lambda: cluster.running()[victim] > begun[victim])
        late = Streamed([])
        engine = engine_of(replicas[victim])
        os.kill(replicas[victim], signal.SIGKILL)
        tasks.append(asyncio.create_task(stream_into(late, client, body(200))))
        texts = await asyncio.gather(*whole)
        await asyncio.gather(*tasks)
        again = await text_of(client, body(200))
    assert texts == expected
    assert (late.error, late.text) == (None, again)
    broken = [streamed for streamed in streams if streamed.error]
    assert all(streamed.has_ended and streamed.lines[-1] == "data: [DONE]" for streamed in streams)
    assert 0 < len(broken) <= begun[victim]
    assert {streamed.error["code"] for streamed in broken if streamed.error} == {"engine_unavailable"}
    wait_until_gone(engine)
    cluster.wait_for_replicas(2, without={replicas[victim]})


async def test_a_replica_whose_engine_dies_is_replaced(cluster: Cluster) -> None:
    replicas = cluster.wait_for_replicas(2)
    async with client_of(cluster) as client:
        expected = [await text_of(client, body(number)) for number in range(6)]
        whole = [asyncio.create_task(text_of(client, body(number))) for number in range(len(expected))]
        await until(lambda: any(cluster.running().values()))
        running = await asyncio.to_thread(cluster.running)
        victim = max(running, key=lambda name: running[name])
        os.kill(engine_of(replicas[victim]), signal.SIGKILL)
        assert await asyncio.gather(*whole) == expected
    wait_until_gone(replicas[victim])
    cluster.wait_for_replicas(2, without={replicas[victim]})


async def test_a_rolling_update_fails_no_request_and_its_limits_hold(cluster: Cluster) -> None:
    before = set(cluster.wait_for_replicas(2).values())
    is_done = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient, first: int) -> int:
        """How many were answered until the update was done, every one of them in full."""
        number = 0
        while not is_done.is_set():
            streamed = Streamed([])
            await stream_into(streamed, client, body(first + number))
            assert streamed.error is None
            assert streamed.lines[-1] == "data: [DONE]"
            await text_of(client, body(first + number))
            number += 2
        return number

    async with client_of(cluster) as client:
        clients = [asyncio.create_task(keep_asking(client, 1000 * i)) for i in range(4)]
        try:
            few = {"max_ongoing_requests": 2, "max_queued_requests": 4}
            await asyncio.to_thread(cluster.deploy, served_model_name="second", **few)
            await asyncio.to_thread(cluster.wait_for_replicas, 2, before)
        finally:
            is_done.set()
            answered = await asyncio.gather(*clients)
        assert min(answered) > 2
        names = {(await client.get("/v1/models")).json()["data"][0]["id"] for _ in range(8)}
        assert names == {"second"}
        wishes = [body(number, max_tokens=200) for number in range(24)]
        asking = [asyncio.create_task(client.post(COMPLETIONS, json=wish)) for wish in wishes]
        await until(lambda: list(cluster.running().values()) == [2, 2])  # told while both are full
        assert (await client.get("/health")).status_code == 200
        crowd = await asyncio.gather(*asking)
    refused = [response for response in crowd if response.status_code != 200]
    assert 0 < len(refused) <= len(crowd) - 4  # two at each replica
    assert {(response.status_code, error_of(response)["code"]) for response in refused} == {(429, "queue_full")}


async def test_replicas_follow_the_load(cluster: Cluster) -> None:
    quick = {"upscale_delay_s": 1, "downscale_delay_s": 5, "metrics_interval_s": 0.5, "look_back_period_s": 2}
    limits = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2}
    engine = {"name": "engine", "autoscaling_config": limits | quick, "max_ongoing_requests": 8}  # all are reserved
    await asyncio.to_thread(cluster.deploy, engine, replicas=1, max_replicas=2, api_key="secret")
    await asyncio.to_thread(cluster.wait_for_replicas, 1)
    async with client_of(cluster) as client:
        assert error_of(await client.post(COMPLETIONS, json=body(1)))["code"] == "invalid_api_key"
        client.headers["Authorization"] = "Bearer secret"
        is_done = asyncio.Event()

        async def keep_asking(number: int) -> None:
            while not is_done.is_set():
                await text_of(client, body(number, max_tokens=200))

        clients = [asyncio.create_task(keep_asking(number)) for number in range(6)]
        try:
            await asyncio.to_thread(cluster.wait_for_replicas, 2)
        finally:
            is_done.set()
            await asyncio.gather(*clients)
    await asyncio.to_thread(cluster.wait_for_replicas, 1)


async def test_a_replica_of_three_ranks_answers_as_a_whole_one(cluster: Cluster) -> None:
    """On CPU; on GPUs a replica reserves as many."""
    texts = []
    for ranks in (1, 3):  # the embedded model's KV heads
        before = await asyncio.to_thread(cluster.replicas)
        one = {"replicas": 1, "max_replicas": 1, "tensor_parallel_size": ranks, "served_model_name": f"of {ranks}"}
        await asyncio.to_thread(cluster.deploy, **one)
        await asyncio.to_thread(cluster.wait_for_replicas, 1, before.values())
        async with client_of(cluster) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == f"of {ranks}"
            texts.append([await text_of(client, body(number)) for number in range(3)])
    assert texts[0] == texts[1]
