"""Several models behind one server: which engine answers, what is listed, what is said when one of them is dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_engines import fake_engine
from fakes import EOS, ByteTokenizer
from gates import StepGate
from hamburger.engine.async_engine import AsyncEngine
from hamburger.server.app import create_app_of, model_context
from hamburger.server.config import ServeSettings
from hamburger.server.operation.metrics import ServerMetrics
from serving import CHAT, COMPLETIONS, HELLO, ByChoice, error_of, events, split, until


class LargerTokenizer(ByteTokenizer):
    """Knows another chat template, so that one sees whose tokenizer was asked."""

    chat_template = tool_template = "{{ messages }} {# of the base #}"


@dataclass
class Pair:
    """Two models: `burger` writes groups of three, `base` single tokens."""

    client: httpx.AsyncClient
    burger: AsyncEngine
    base: AsyncEngine
    runners: dict[str, ByChoice]

    async def complete(self, model: str | None, **fields: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return await self.client.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 3, **named, **fields})

    async def metrics(self) -> dict[tuple[str, str, str | None], float]:
        """(metric, model_name, code) -> value."""
        text = (await self.client.get("/metrics")).text
        found: dict[tuple[str, str, str | None], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, sample.labels["model_name"], sample.labels.get("code"))
                found[key] = found.get(key, 0) + sample.value
        return found


@asynccontextmanager
async def pair(
    second: str = "base", base_runner: ByChoice | None = None, base_engine: dict[str, Any] | None = None
) -> AsyncIterator[Pair]:
    runners = {"burger": ByChoice(split("AAA", 3)), second: base_runner or ByChoice(split("bbb", 1, 1, 1))}
    first, settings = ServerMetrics("burger"), ServeSettings()
    metrics = ServerMetrics(second, beside=first)
    async with (
        fake_engine(runners["burger"], observer=first) as burger,
        fake_engine(runners[second], observer=metrics, **(base_engine or {"max_model_len": 99})) as base,
    ):
        contexts = [
            model_context(burger, ByteTokenizer(), first, settings, "burger"),
            model_context(base, LargerTokenizer(), metrics, settings, second),
        ]
        transport = httpx.ASGITransport(create_app_of(contexts, settings), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield Pair(client, burger, base, runners)


async def test_the_name_chooses_the_engine_and_none_means_the_first() -> None:
    async with pair() as served:
        for asked, named, text, slots in (
            ("burger", "burger", "AAA", 1),
            ("base", "base", "bbb", 3),
            (None, "burger", "AAA", 1),
            ("base@0.5", "base@0.5", "bbb", 3),
        ):
            answer = (await served.complete(asked)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (named, text)
            assert answer["usage"]["kv_slots"] == slots
        assert served.runners["burger"].confidences == [0.8, 0.8]  # the engine's own
        assert served.runners["base"].confidences == [0.8, 0.5]


async def test_both_answer_at_once_streamed_and_in_chat() -> None:
    async with pair() as served:

        async def stream(model: str) -> list[dict[str, Any]]:
            body = {"model": model, "messages": HELLO, "max_tokens": 3, "stream": True}
            return events((await served.client.post(CHAT, json=body)).text)

        streams = await asyncio.gather(*(stream(model) for model in ("burger", "base") * 4))
    for i, chunks in enumerate(streams):
        assert {chunk["model"] for chunk in chunks} == {("burger", "base")[i % 2]}
        *deltas, end = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert end is None
        assert deltas == [["AAA"], ["b", "b", "b"]][i % 2]


@pytest.mark.parametrize("name", ["other", "bas", "base@", "base@high", "@0.5", "burger/base", ""])
async def test_an_unknown_model_is_a_404_that_names_all(name: str) -> None:
    async with pair() as served:
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            body = {"model": name, "messages": HELLO} if path == CHAT else {"model": name, "prompt": "a", "tokens": [1]}
            response = await served.client.post(path, json=body)
            assert response.status_code == 404
            error = error_of(response)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert "burger, base" in error["message"]
        assert (await served.client.get("/tokenizer_info", params={"model": name or "x"})).status_code == 404
        assert not any(runner.num_steps for runner in served.runners.values())
        metrics = await served.metrics()
        failures = {key[1:]: value for key, value in metrics.items() if "failure_total" in key[0] and value}
        assert failures == {("", "404"): 5}  # it is no model's


async def test_a_wrong_confidence_and_other_errors_are_those_of_the_model_that_was_asked() -> None:
    async with pair() as served:
        assert (await served.complete("base@1.5")).status_code == 400
        assert (await served.complete("base", max_tokens=500)).status_code == 400
        assert (await served.complete("burger", max_tokens=100)).status_code == 200  # whose context is longer
        assert (
            await served.client.post(COMPLETIONS, content=b"{", headers={"Content-Type": "application/json"})
        ).status_code == 400
        found = await served.metrics()
    assert found["hamburger_request_failure_total", "base", "400"] == 2
    assert found["hamburger_request_failure_total", "", "400"] == 1
    assert found["hamburger_request_failure_total", "burger", "400"] == 0


async def test_both_are_listed_with_what_is_their_own() -> None:
    async with pair() as served:
        cards = {card["id"]: card for card in (await served.client.get("/v1/models")).json()["data"]}
        assert list(cards) == ["burger", "base"]
        assert (cards["burger"]["max_model_len"], cards["base"]["max_model_len"]) == (256, 99)
        assert (await served.client.get("/v1/models/base")).json() == cards["base"]
        alias = (await served.client.get("/v1/models/base@0.33")).json()
        assert (alias["id"], alias["parent"], alias["max_model_len"]) == ("base@0.33", "base", 99)
        assert (await served.client.get("/v1/models/other")).status_code == 404


async def test_each_has_its_own_tokenizer() -> None:
    async with pair() as served:
        for params, template in (
            ({}, ByteTokenizer.chat_template),
            ({"model": "burger"}, ByteTokenizer.chat_template),
            ({"model": "base@0.5"}, LargerTokenizer.chat_template),
        ):
            told = (await served.client.get("/tokenizer_info", params=params)).json()
            assert told["chat_template"] == template
        told = (await served.client.post("/tokenize", json={"prompt": "ab", "model": "base"})).json()
        assert (told["count"], told["max_model_len"]) == (3, 99)
        body = {"tokens": [97, 98], "model": "base"}
        assert (await served.client.post("/detokenize", json=body)).json() == {"prompt": "ab"}


async def test_a_name_that_looks_like_an_alias_is_a_name() -> None:
    async with pair(second="burger@0.5") as served:
        assert (await served.complete("burger@0.5")).json()["choices"][0]["text"] == "bbb"
        assert (await served.complete("burger@0.50")).json()["choices"][0]["text"] == "AAA"
        assert (await served.complete("burger@0.5@0.3")).json()["choices"][0]["text"] == "bbb"


async def test_one_dead_engine_makes_the_server_unhealthy_and_the_other_answers_on() -> None:
    async with pair(base_runner=ByChoice([[98]] * 3, fail_at_step=1)) as served:
        well = (await served.client.get("/health")).json()
        assert well == {"status": "ok", "models": {"burger": "ok", "base": "ok"}}
        assert (await served.client.get("/ready")).json()["models"] == {"burger": "ready", "base": "ready"}
        assert (await served.complete("base")).status_code == 503
        for path, word in (("/health", "ok"), ("/ready", "ready")):
            response = await served.client.get(path)
            assert response.status_code == 503
            told = response.json()
            assert told["models"]["burger"] == word
            assert told["models"]["base"] == "the engine is dead"
            assert told["reason"] == f"base: {told['models']['base']}"
        assert (await served.complete("burger")).status_code == 200
        found = await served.metrics()
        assert found["hamburger_request_failure_total", "base", "503"] == 1
        assert found["hamburger_e2e_request_latency_seconds_count", "burger", None] == 1


async def test_a_full_queue_is_one_models_and_the_server_is_not_ready() -> None:
    gate = StepGate()
    engine = {"max_num_seqs": 1, "max_queue": 1}
    async with pair(base_runner=ByChoice([[98]] * 3, gate=gate), base_engine=engine) as served:
        asking = [asyncio.create_task(served.complete("base")) for _ in range(2)]
        await until(lambda: served.base.health().num_waiting == 2)
        assert (await served.complete("base")).status_code == 429
        told = (await served.client.get("/ready")).json()
        assert told["models"] == {"burger": "ready", "base": "full: 2 requests wait"}
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.complete("burger")).status_code == 200
        found = await served.metrics()
        waiting = {key[1]: value for key, value in found.items() if key[0] == "hamburger_num_requests_waiting"}
        assert waiting == {"burger": 0, "base": 2}
        gate.set()
        assert [response.status_code for response in await asyncio.gather(*asking)] == [200, 200]


async def test_each_family_of_metrics_is_one_with_a_series_for_each_model() -> None:
    async with pair() as served:
        await served.complete("burger")
        await served.complete("base")
        text = (await served.client.get("/metrics")).text
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        found = await served.metrics()
        assert found["hamburger_generation_tokens_total", "burger", None] == 3
        assert found["hamburger_generation_tokens_total", "base", None] == 3
        assert found["hamburger_macro_steps_total", "burger", None] == 1
        assert found["hamburger_macro_steps_total", "base", None] == 3
        of_the_server = {"hamburger_resident_memory_bytes"}  # these engines run in its process
        by_model = {m: {key[0] for key in found if key[1] == m} - of_the_server for m in ("burger", "base")}
        assert by_model["burger"] == by_model["base"]


async def test_a_draining_model_refuses_and_the_other_answers() -> None:
    async with pair(base_runner=ByChoice([[EOS]])) as served:
        served.base.drain()
        assert (await served.complete("base")).status_code == 503
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.get("/ready")).json()["reason"] == "base: draining"
        assert (await served.complete("burger")).status_code == 200
