"""Keys, models, tokenizer, health and readiness, and what an operator sees in the metrics."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest

from fakes import EOS
from gates import StepGate
from hamburger.engine.health import EngineHealth, liveness_fault
from hamburger.server.operation.recent_groups import RecentGroups
from serving import CHAT, COMPLETIONS, HELLO, MODEL, ByChoice, Served, error_of, on_port, serving, split, until

KEYS = {"api_key": "first,second"}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic first", "first", "Bearer é"])
async def test_a_wrong_or_missing_key_is_a_401(header: str | None) -> None:
    headers = {} if header is None else {b"Authorization": header.encode()}
    async with serving([[EOS]], settings=KEYS) as server:
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            response = await server.client.post(path, json={"messages": HELLO, "prompt": "a"}, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("key", ["first", "second"])
async def test_each_key_opens_and_operation_needs_none(key: str) -> None:
    async with serving([[97], [EOS]], settings=KEYS) as server:
        body = {"prompt": "a"}
        response = await server.client.post(COMPLETIONS, json=body, headers={"Authorization": f"bearer {key}"})
        assert response.status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await server.client.get(path)).status_code == 200


async def test_an_empty_bearer_passes_without_keys() -> None:
    async with serving([[97], [EOS]]) as server:
        response = await server.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"Authorization": "Bearer "})
    assert response.status_code == 200


async def test_models_lists_each_once_and_answers_for_any_confidence() -> None:
    async with serving(max_model_len=99) as server:
        cards = (await server.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == [MODEL]
        assert cards[0]["aliases"] == [f"{MODEL}@c, with a confidence c in [0, 1]"]
        assert cards[0]["max_model_len"] == 99
        one = await server.client.get(f"/v1/models/{MODEL}@0.33")
        assert one.json()["id"] == f"{MODEL}@0.33"
        assert one.json()["parent"] == MODEL
        missing = await server.client.get("/v1/models/other/name")
        assert missing.status_code == 404
        assert error_of(missing)["param"] == "model"


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with serving() as server:
        told = await server.ok("/tokenize", {"prompt": "añb", "add_special_tokens": False})
        assert told["tokens"] == list("añb".encode())
        assert (told["count"], told["max_model_len"]) == (4, server.engine.info.max_model_len)
        assert (await server.ok("/detokenize", {"tokens": told["tokens"]}))["prompt"] == "añb"
        chat = await server.ok("/tokenize", {"messages": HELLO})
        assert bytes(chat["tokens"]) == b"user: hello\nassistant: "
        assert (await server.refused("/tokenize", {}))[0] == 400
        assert (await server.refused("/tokenize", {"prompt": "a", "messages": HELLO}))[0] == 400
        status, error = await server.refused("/detokenize", {"tokens": [10**6]})
        assert (status, error["param"]) == (400, "tokens")
        told = (await server.client.get("/tokenizer_info")).json()
        assert told.keys() == {"eos_token", "bos_token", "pad_token", "chat_template"}
        assert "version" in (await server.client.get("/version")).json()


def state(**fields: Any) -> EngineHealth:
    plain: dict[str, Any] = {"alive": True, "draining": False, "num_running": 1, "num_waiting": 0}
    plain |= {"seconds_in_step": None, "seconds_without_step": 0.0, "error": None}
    return EngineHealth(**{**plain, **fields})


def test_a_long_step_is_alive_and_a_hung_engine_is_not() -> None:
    assert liveness_fault(state(seconds_in_step=60.0)) is None  # one long prefill
    assert liveness_fault(state(num_running=0, seconds_without_step=1e6)) is None  # idle for days
    assert "step" in (liveness_fault(state(seconds_in_step=500.0)) or "")
    assert "step" in (liveness_fault(state(seconds_without_step=500.0)) or "")
    assert liveness_fault(state(alive=False, error="boom")) == "the engine is dead"  # why, is not for everybody
    assert liveness_fault(state(alive=False, error="boom", restarting=True)) is None
    assert liveness_fault(state(alive=False, draining=True)) is None  # ended before another model's
    assert liveness_fault(state(alive=False, draining=True, error="boom")) == "the engine is dead"
    assert "step" in (liveness_fault(state(draining=True, seconds_in_step=500.0)) or "")


async def test_draining_is_alive_but_not_ready_and_a_dead_engine_is_neither() -> None:
    async with serving([[EOS]]) as server:
        assert (await server.client.get("/ready")).status_code == 200
        server.engine.drain()
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/ready")).status_code == 503
    async with serving(runner=ByChoice([[97]] * 9, fail_at_step=1)) as server:
        await server.refused(COMPLETIONS, {"prompt": "a"})
        for path in ("/health", "/ready"):
            response = await server.client.get(path)
            assert response.status_code == 503
            assert response.json()["reason"] == "the engine is dead"
        assert "scripted failure" in str(server.engine.health().error)
        server.engine.starts_again = True
        for path, status, told in (("/health", 200, "restarting"), ("/ready", 503, "the engine starts again")):
            response = await server.client.get(path)
            assert (response.status_code, response.json()["models"]) == (status, {MODEL: told})


async def test_a_full_queue_is_not_ready() -> None:
    gate = StepGate()
    runner = ByChoice([[97]] * 9, gate=gate)
    async with serving(runner=runner, max_num_seqs=1, max_queue=1) as server:
        asking = [asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a"})) for _ in range(2)]
        await until(lambda: server.engine.health().num_waiting == 2)
        assert (await server.client.get("/ready")).status_code == 503
        assert (await server.client.get("/health")).status_code == 200
        gate.set()
        assert [response.status_code for response in await asyncio.gather(*asking)] == [200, 200]


async def test_a_first_token_is_told_when_it_comes_and_so_is_a_wait_for_nothing() -> None:
    now, gate = [0.0], StepGate()
    runner = ByChoice([[97]] * 100, gate=gate)
    async with serving(runner=runner, max_num_seqs=1, max_queue_seconds=5.0, clock=lambda: now[0]) as server:
        running = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 9}))
        gate.step()
        await until(lambda: server.metric("time_to_first_token_seconds_count") == 1)
        assert server.metric("prompt_tokens_total") == server.metric("request_prompt_tokens_sum") == 2  # BOS and a byte
        assert server.metric("e2e_request_latency_seconds_count") == 0
        waiting = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "ab"}))
        await until(lambda: server.engine.health().num_waiting == 1)
        now[0] = 6.0
        gate.set()
        assert [response.status_code for response in await asyncio.gather(running, waiting)] == [200, 503]
        assert server.metric("request_queue_time_seconds_count") == 2
        assert server.metric("request_queue_time_seconds_bucket", le="5.0") == 1
        assert server.metric("request_prompt_tokens_count") == 2
        assert server.metric("prompt_tokens_total") == 2
        assert server.metric("time_to_first_token_seconds_count") == 1


async def test_metrics_count_groups_slots_and_requests() -> None:
    async with serving(split("abcdefg", 3, 1, 3)) as server:
        await server.complete(max_tokens=7, confidence=0.75)
        await until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("prompt_tokens_total") == 3  # BOS and two bytes
        assert server.metric("generation_tokens_total") == 7
        assert server.metric("kv_slots_total", kind="generated") == 3
        assert server.metric("kv_slots_total", kind="prompt") == 3
        assert server.metric("macro_steps_total") == 3
        assert server.metric("group_size_count") == 3
        assert server.metric("group_size_sum") == 7
        assert server.metric("group_size_bucket", le="1.0") == 1
        assert server.metric("inter_token_latency_seconds_count") == 4  # each token after the first group
        assert server.metric("time_to_first_token_seconds_count") == 1
        assert server.metric("request_success_total", finished_reason="length") == 1
        assert server.metric("request_confidence_bucket", le="0.8") == 1
        assert server.metric("request_confidence_bucket", le="0.7") == 0
        assert server.metric("tokens_per_kv_ratio") == pytest.approx(7 / 3)
        assert server.metric("tokens_per_macro_step") == pytest.approx(7 / 3)
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.metric("resident_memory_bytes", process="server") > 10e6
        assert server.metric("cache_config_info", block_size=str(server.engine.info.block_size)) == 1


async def test_an_engine_that_was_started_anew_tells_its_own_pool() -> None:
    async with serving([[97]]) as server:
        before = server.engine.info
        server.engine.info = replace(before, total_slots=before.total_slots + 16)
        page = (await server.client.get("/metrics")).text
        told = [line for line in page.splitlines() if line.startswith("hamburger_cache_config_info{")]
        assert len(told) == 1
        assert f'total_slots="{before.total_slots + 16}"' in told[0]


async def test_a_request_for_several_answers_is_completed_once() -> None:
    async with serving([[97], [98], [EOS]], max_num_seqs=1) as server:  # its answers end one after the other
        await server.complete(n=4, temperature=1)
        await server.complete(prompt=["a", "b", "c"])
        await server.complete()
        await server.post(CHAT, {"messages": HELLO, "stream": True, "n": 2})
        await until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("request_success_total") == 10
        assert server.metric("request_completed_total") == 4


async def test_a_request_for_several_answers_that_fails_is_not_completed() -> None:
    async with serving(runner=ByChoice([[97]] * 9, fail_at_step=1)) as server:
        status, _ = await server.refused(COMPLETIONS, {"prompt": "a", "n": 4, "temperature": 1})
        assert status == 503
        assert server.metric("request_failure_total") == 1
        assert server.metric("request_completed_total") == server.metric("request_success_total") == 0


def test_recent_groups_forget() -> None:
    now = [100.0]
    recent = RecentGroups(lambda: now[0])
    recent.add(12, 4, 2)
    now[0] += 1
    assert recent.tokens_per_kv() == 3
    assert recent.tokens_per_macro_step() == 6
    assert recent.tokens_per_second() > 0
    now[0] += 30
    assert recent.tokens_per_second() == 0
    assert recent.tokens_per_kv() == 3
    now[0] += 60
    assert recent.tokens_per_kv() == recent.tokens_per_macro_step() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_slots_and_is_counted(stream: bool) -> None:
    runner = ByChoice([[97]] * 10_000, delay_seconds=0.001)
    async with serving(runner=runner, max_model_len=20_000, num_blocks=10_000) as server, on_port(server.app) as port:
        with socket.socket() as client:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
            body = b'{"prompt": "a", "max_tokens": 9999, "stream": %s}' % str(stream).lower().encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += b"Content-Length: %d\r\n\r\n" % len(body)
            await asyncio.get_running_loop().sock_sendall(client, head + body)
            await until(lambda: runner.num_steps > 5)
        await until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("request_success_total", finished_reason="abort") == 1
        await until(lambda: server.metric("kv_cache_usage_perc") == 0)


async def test_gauges_fall_to_zero_after_a_mass_cancel() -> None:
    gate = StepGate()
    runner = ByChoice([[97]] * 1000, gate=gate)

    async def ask(server: Served, port: int) -> None:
        async with httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{port}{COMPLETIONS}"
            await client.post(url, json={"prompt": "a", "max_tokens": 50}, timeout=30)

    async with serving(runner=runner, max_num_seqs=4) as server, on_port(server.app) as port:
        tasks = [asyncio.create_task(ask(server, port)) for _ in range(20)]
        await until(lambda: server.engine.health().num_waiting >= 16)
        for task in tasks:
            task.cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            await until(lambda name=gauge: server.metric(name) == 0)  # type: ignore[misc]


async def test_streamed_bytes_are_events_split_by_newlines_alone() -> None:
    async with (
        serving(split("añ\u2028b", 2, 2, 3)) as server,
        on_port(server.app) as port,
        httpx.AsyncClient() as client,
    ):
        url = f"http://127.0.0.1:{port}{CHAT}"
        response = await client.post(url, json={"messages": HELLO, "stream": True, "max_tokens": 7})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert b"\r" not in response.content
    assert "\u2028" not in response.text
    events = response.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: {") for event in events[:-2])


async def test_head_asks_as_get_does() -> None:
    async with serving() as server:
        for path in ("/health", "/ready", "/metrics"):
            head, get = await server.client.head(path), await server.client.get(path)
            assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"])
