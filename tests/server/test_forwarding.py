"""The front of several replicas: what is sent again, what is not, and that all else is a replica's own answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from fakes import EOS
from hamburger.engine.types.errors import QueueFull
from hamburger.server.config import ServeSettings
from hamburger.server.load_settings import load_settings
from hamburger.server.replicas import forwarding
from hamburger.server.replicas.forwarding import ReplicaLost, create_front, merge_pages, replica_settings
from hamburger.server.replicas.replica import Replica, WholeRequest, WholeResponse
from hamburger.server.replicas.scale_options import ScaleOptions
from hamburger.server.responses.store import ResponseStore
from serving import CHAT, COMPLETIONS, HELLO, ByChoice, Served, error_of, events, on_port, serving, split, until

Fault = Callable[[int], BaseException | None]


class Listed:
    """Replicas in this process. faults: for each attempt in turn, what is raised after so many messages."""

    def __init__(self, *servers: Served, faults: list[Fault] | None = None) -> None:
        self.replicas = [Replica(server.app, server.engine) for server in servers]
        self.faults = faults or []
        self.keys: list[str | None] = []

    async def send(self, call: WholeRequest, key: str | None) -> AsyncGenerator[list[Message]]:
        attempt = len(self.keys)
        self.keys.append(key)
        fault = self.faults[attempt] if attempt < len(self.faults) else lambda taken: None
        taken = 0
        async with contextlib.aclosing(self.replicas[attempt % len(self.replicas)].answer(call)) as batches:
            if isinstance(fault(0), StopAsyncIteration):
                return  # full
            async for batch in batches:
                for messages in [[message] for message in batch] or [[]]:
                    if (error := fault(taken)) is not None:
                        raise error
                    yield messages
                    taken += len(messages)

    async def ask_all(self, call: WholeRequest) -> list[WholeResponse]:
        return [await replica.whole(call) for replica in self.replicas]


class Nobody:
    """No replica takes anything."""

    async def send(self, call: WholeRequest, key: str | None) -> AsyncGenerator[list[Message]]:
        async for batch in _never():
            yield batch

    async def ask_all(self, call: WholeRequest) -> list[WholeResponse]:
        raise ReplicaLost("none runs")


async def _never() -> AsyncGenerator[list[Message]]:
    await until(lambda: False)
    yield []


def lost_after(number: int) -> Fault:
    return lambda taken: ReplicaLost("gone") if taken >= number else None


@contextlib.asynccontextmanager
async def front(
    replicas: Any, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_front(replicas, ScaleOptions(**options), ServeSettings(**(settings or {})))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        yield client


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(forwarding, "_FULL_PAUSE", 0.0)


async def test_every_route_is_a_replicas() -> None:
    async with serving(split("hello", 2, 3)) as server, front(Listed(server)) as client:
        plain = await client.post(COMPLETIONS, json={"prompt": "a"})
        assert plain.json()["choices"][0]["text"] == "hello"
        streamed = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert "".join(event["choices"][0]["text"] for event in events(streamed.text)) == "hello"
        assert "x-request-id" not in plain.headers  # the server in front of this one gives it
        for method, path, body in [
            ("POST", CHAT, {"messages": HELLO, "max_tokens": 0}),
            ("GET", "/nothing", None),
            ("DELETE", "/v1/models", None),
            ("GET", "/openapi.json", None),
            ("GET", "/v1/models/burger@2", None),
            ("POST", "/tokenize", {"prompt": "añb"}),
        ]:
            ours, theirs = [await c.request(method, path, json=body) for c in (client, server.client)]
            assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content), path


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_was_lost_before_its_first_byte_is_sent_again(stream: bool) -> None:
    async with serving(split("hello", 2, 3)) as one, serving(split("hello", 2, 3)) as two:
        # The third is lost with the head of its answer there, of which nothing has left yet.
        listed = Listed(one, two, faults=[lost_after(0), lost_after(0), lost_after(1)])
        async with front(listed) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert response.status_code == 200
        found = events(response.text) if stream else [response.json()]
        assert "".join(event["choices"][0]["text"] for event in found) == "hello"
        first, *others = listed.keys
        assert len({first, *others}) == 4  # a replica that is lost and still listed is not insisted on
        assert all(key is not None and key.startswith(f"{first}/") for key in others)


async def test_a_stream_that_had_begun_ends_with_an_error_event_and_is_not_sent_again() -> None:
    async with serving(split("hello", 2, 3)) as server:
        listed = Listed(server, faults=[lost_after(2)])
        async with front(listed) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    first, last = events(response.text)
    assert first["choices"][0]["text"] == "he"
    assert last["error"]["code"] == "engine_unavailable"
    assert len(listed.keys) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "a"}), ("/v1/messages", {"max_tokens": 9, "messages": HELLO})],
)
async def test_other_forms_of_a_stream_end_in_their_own_way(path: str, body: dict[str, Any]) -> None:
    async with serving(split("hello", 2, 3)) as server, front(Listed(server, faults=[lost_after(2)])) as client:
        response = await client.post(path, json={**body, "stream": True})
        unknown = await client.post(path, json={**body, "model": "other"})
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    told = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    if path == "/v1/responses":
        assert names[-2:] == ["error", "response.failed"]
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        failed = told.pop()["response"]
        assert (failed["id"], failed["status"]) == (told[0]["response"]["id"], "failed")
        assert "was lost" in failed["error"]["message"]
    else:
        assert names[-1] == "error"
    assert "was lost" in str(told[-1])
    assert "[DONE]" not in response.text
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_dead_engine_counts_as_lost() -> None:
    async with serving(runner=ByChoice([[97]] * 9, fail_at_step=1)) as dead, serving(split("hello", 5)) as alive:
        async with front(Listed(dead, alive)) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a"})
            assert response.json()["choices"][0]["text"] == "hello"
        async with front(Listed(dead)) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")
    assert response.headers["retry-after"]


async def test_what_harms_each_replica_is_given_up() -> None:
    async with serving([[EOS]]) as server:
        listed = Listed(server, faults=[lost_after(0)] * 9)
        async with front(listed, retries=2) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert (response.status_code, error_of(response)["message"]) == (
        503,
        "The request was given to 3 replicas, and each was lost.",
    )
    assert len(listed.keys) == 3


async def test_errors_of_the_way_have_our_shape() -> None:
    def full(taken: int) -> BaseException:
        return QueueFull("Full.", 7)

    def bug(taken: int) -> BaseException:
        return RuntimeError("secret")

    async with serving([[EOS]]) as server:
        listed = Listed(server, faults=[full, bug])
        async with front(listed, {"cors_origin": ["https://a.example"]}) as client:
            first, second = [
                await client.post(COMPLETIONS, json={"prompt": "a"}, headers={"Origin": "https://a.example"})
                for _ in range(2)
            ]
    assert (first.status_code, error_of(first)["code"], first.headers["retry-after"]) == (429, "queue_full", "7")
    assert second.status_code == 500
    assert "secret" not in second.text
    for response in (first, second):
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers.get_list("cache-control") == ["no-store"]


async def test_a_request_waits_for_full_replicas() -> None:
    def full(taken: int) -> BaseException:
        return StopAsyncIteration()

    async with serving(split("hello", 5)) as server:
        listed = Listed(server, faults=[full] * 5)
        async with front(listed, retries=0) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a"})
        assert response.json()["choices"][0]["text"] == "hello"
        assert len(listed.keys) == 6
        assert len(set(listed.keys)) == 1
        async with front(Listed(server, faults=[full] * 9), {"max_queue_seconds": 1e-9}) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert (response.status_code, error_of(response)["code"]) == (503, "queue_timeout")


async def test_nobody_takes_it() -> None:
    async with front(Nobody(), {"max_queue_seconds": 0.05}) as client:
        waited = await client.post(COMPLETIONS, json={"prompt": "a"})
        assert (waited.status_code, error_of(waited)["code"]) == (503, "queue_timeout")
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 503


async def test_a_body_that_is_too_large_is_refused_by_a_replica() -> None:
    small = {"max_body_size": 100}
    async with serving([[EOS]], settings=small) as server, front(Listed(server), small) as client:
        response = await client.post(COMPLETIONS, content=b" " * 5000, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert "max_body_size" in error_of(response)["message"]


async def test_a_client_that_leaves_frees_its_seat() -> None:
    async with serving(runner=ByChoice([[97]] * 200, delay_seconds=0.01)) as server:
        app = create_front(Listed(server), ScaleOptions(), ServeSettings())
        async with on_port(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            wish = {"prompt": "a", "stream": True, "max_tokens": 200}
            async with client.stream("POST", COMPLETIONS, json=wish) as response:
                await anext(response.aiter_raw())
            await until(lambda: server.metric("request_success_total", finished_reason="abort") == 1)
            with pytest.raises(httpx.ReadTimeout):
                await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 200}, timeout=0.1)
            await until(lambda: server.metric("request_success_total", finished_reason="abort") == 2)


async def test_one_page_of_metrics_and_the_best_health_of_any() -> None:
    async with serving([[EOS]]) as one, serving([[EOS]]) as two, front(Listed(one, two)) as client:
        page = (await client.get("/metrics")).text
        assert page.count("# TYPE hamburger_macro_steps_total counter") == 1
        assert page.count("\nhamburger_macro_steps_total{") == 2
        one.engine.drain()
        assert (await client.get("/ready")).status_code == 200
        two.engine.drain()
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200


async def test_a_prefix_of_all_paths_changes_nothing() -> None:
    settings: dict[str, Any] = {"api_key": ["secret"]}
    async with serving([[EOS]], settings=settings) as one, serving([[EOS]], settings=settings) as two:
        listed = Listed(one, two)
        app = create_front(listed, ScaleOptions(), ServeSettings(**settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path="/two")
        async with httpx.AsyncClient(transport=transport, base_url="http://front/two") as client:
            assert (await client.get("/metrics")).text.count("\nhamburger_macro_steps_total{") == 2
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.post("/v1/messages")).json()["type"] == "error"  # as Anthropic's clients read it
            assert listed.keys == []
            stored = ResponseStore(0, place="cvnotb69").new_id()
            headers = {"Authorization": "Bearer secret"}
            assert (await client.get(f"/v1/responses/{stored}", headers=headers)).status_code == 404
            refused = await client.post("/v1/messages", json={}, headers=headers)
            assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert listed.keys == ["@cvnotb69", None]


async def test_metrics_of_replicas_that_want_a_key_want_it_here() -> None:
    settings = {"api_key": ["secret"], "public_operation": False}
    async with serving([[EOS]], settings=settings) as server, front(Listed(server), settings) as client:
        assert error_of(await client.get("/metrics"))["code"] == "invalid_api_key"
        allowed = await client.get("/metrics", headers={"Authorization": "Bearer secret"})
        assert allowed.text.startswith("# HELP")


@pytest.mark.parametrize(("method", "path"), [("POST", COMPLETIONS), ("POST", "/tokenize"), ("GET", "/v1/models")])
async def test_without_a_key_nothing_reaches_a_replica(method: str, path: str) -> None:
    """It would wait for a seat, in the place of somebody who has one."""
    settings = {"api_key": ["secret"]}
    async with serving([[EOS]], settings=settings) as server:
        listed = Listed(server)
        async with front(listed, settings) as client:
            refused = await client.request(method, path, content=b"{", headers={"Authorization": "Bearer other"})
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            named = await client.post("/v1/messages", headers={"X-Request-Id": "mine"})
            assert (named.status_code, named.json()["request_id"], named.headers["request-id"]) == (401, "mine", "mine")
            assert listed.keys == []
            answered = await client.get("/v1/models", headers={"Authorization": "Bearer secret"})
            assert (answered.status_code, len(listed.keys)) == (200, 1)
            assert (await client.get("/version")).status_code == 200


def test_pages_are_merged_by_family() -> None:
    head = "# HELP a A.\n# TYPE a counter\n"
    other = "# HELP b B.\n# TYPE b gauge\n"
    merged = merge_pages([f'{head}a{{e="1"}} 1\n{other}b{{e="1"}} 2\n', f'{head}a{{e="2"}} 3\n{other}b{{e="2"}} 4\n'])
    assert merged == f'{head}a{{e="1"}} 1\na{{e="2"}} 3\n{other}b{{e="1"}} 2\nb{{e="2"}} 4\n'


def test_web_pages_are_answered_for_once() -> None:
    settings = load_settings({"cors_origin": ["https://a.example"], "max_num_seqs": 3})
    replicas_own = replica_settings(settings)
    assert (replicas_own.cors_origin, replicas_own.engine_args().max_num_seqs) == ([], 3)
