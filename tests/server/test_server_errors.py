"""Every error row of the contract: one shape, the right status, and the field as the client wrote it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from fakes import EOS
from gates import StepGate
from hamburger.engine.core.batch import ScheduledBatch
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.sampling_params import SamplingParams
from serving import CHAT, COMPLETIONS, HELLO, MODEL, ByChoice, Served, error_of, on_port, serving, split, until

BAD_BOTH: list[tuple[str, Any]] = [
    ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("top_p", 0), ("top_p", 1.5), ("top_p", "1"),
    ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("n", 0), ("n", 129), ("n", True), ("n", 1.0),
    ("seed", -(2**63) - 1),
    ("seed", 2**63), ("seed", 0.5), ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", True),
    ("max_tokens", 10**30), ("min_tokens", -1), ("stop", 5), ("stop", [1]), ("stop", [""]), ("stop_token_ids", ["a"]),
    ("stop_token_ids", [10**6]), ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
    ("logit_bias", {"a": 1}), ("logit_bias", {"999": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"5": 101}),
    ("logit_bias", []), ("logit_bias", {"5": "1"}), ("stream", "yes"), ("stream", 1), ("stream_options", 1),
    ("stream_options", {"include_usage": True}), ("ignore_eos", 1), ("skip_special_tokens", "no"), ("confidence", 1.1),
    ("confidence", -0.1), ("confidence", "0.5"), ("confidence", True), ("return_groups", 1), ("model", 5), ("user", 1),
    ("store", True), ("service_tier", "flex"),
    ("echo", "yes"), ("guided_json", 5), ("use_beam_search", True), ("structural_tag", "x"),
    ("n_predict", 5), ("repeat_penalty", 1.1), ("grammar", "root ::= x"), ("json_schema", 5), ("mirostat", 2),
    ("dry_multiplier", 0.8), ("typical_p", 0.9), ("samplers", ["top_k"]),
    ("prompt_logprobs", 21), ("min_tokens", 300), ("model", f"{MODEL}@1.5"), ("model", f"{MODEL}@-1"),
]  # fmt: skip
BAD_CHAT: list[tuple[str, Any]] = [
    ("messages", []), ("messages", "hi"), ("messages", [5]), ("messages", [{"role": "user"}]), ("messages", None),
    ("messages", [{"role": "wizard", "content": "a"}]), ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]), ("messages", [{"role": "user", "content": ["a"]}]),
    ("messages", [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]), ("logprobs", 1),
    ("top_logprobs", 21), ("top_logprobs", -1), ("top_logprobs", 1), ("tools", [{"type": "function"}]),
    ("functions", [{"name": "f"}]),
    ("audio", {}), ("modalities", ["text", "audio"]), ("prediction", {}),
    ("echo", True), ("reasoning_effort", "high"), ("web_search_options", {}), ("max_completion_tokens", 0),
    ("max_completion_tokens", "a"), ("add_generation_prompt", "x"), ("documents", [{}]), ("chat_template", "x"),
]  # fmt: skip
BAD_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", 5), ("prompt", []), ("prompt", [True]), ("prompt", [1, "a"]), ("prompt", [[]]),
    ("prompt", ["a", [1]]), ("prompt", [[1], "a"]), ("prompt", [1.5]), ("prompt", [-1]), ("prompt", [10**6]),
    ("prompt", {"a": 1}), ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("best_of", 0),
    ("best_of", 129), ("best_of", "1"),
    ("suffix", "end"), ("add_special_tokens", 1),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[Served]:
    """One server for what is refused, which leaves it as it was."""
    async with serving([[EOS]]) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, field, value) for path in (CHAT, COMPLETIONS) for field, value in BAD_BOTH]
    + [(CHAT, field, value) for field, value in BAD_CHAT]
    + [(COMPLETIONS, field, value) for field, value in BAD_COMPLETION],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_field_is_a_400_that_names_it(refusing: Served, path: str, field: str, value: Any) -> None:
    request = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    before = refusing.metric("request_failure_total", code="400")
    status, error = await refusing.refused(path, {**request, field: value})
    assert refusing.engine.health().num_waiting == 0
    assert refusing.metric("request_failure_total", code="400") == before + 1
    assert (status, error["param"]) == (400, field), error
    assert error["type"] == "invalid_request_error"
    assert refusing.runner.prompts == []


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"nonsense", b'{"prompt": "a"} x', b"[1]", b'"a"', b"null", b"5", b"\xff\xfe", b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_no_json_object_is_a_400(refusing: Served, content: bytes) -> None:
    response = await refusing.client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] is None


async def test_an_infinite_number_is_a_400_that_names_it() -> None:
    async with serving([[EOS]]) as server:
        response = await server.client.post(
            COMPLETIONS, content=b'{"prompt": "a", "temperature": 1e999}', headers={"Content-Type": "application/json"}
        )
    assert response.status_code == 400
    assert error_of(response)["param"] == "temperature"


async def test_a_body_that_is_too_large_is_a_413() -> None:
    async with serving([[EOS]], settings={"max_body_size": "1MiB"}) as server:
        status, _ = await server.refused(COMPLETIONS, {"prompt": "a" * 2**20})
        assert status == 413
        assert (await server.refused(COMPLETIONS, {"prompt": "a" * (2**20 - 100)}))[0] == 400  # too long, not too large


async def test_unknown_paths_and_methods_have_the_shape_too() -> None:
    async with serving() as server:
        assert error_of(response := await server.client.get("/v2/nothing"))["param"] is None
        assert response.status_code == 404
        assert error_of(response := await server.client.get(CHAT))["message"]
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert server.metric("request_failure_total", code="404") == 1


@pytest.mark.parametrize("name", ["gpt-4", "burger@", "burger@x", "burger@nan", "burger@1e-1", "other@0.9", ""])
async def test_an_unknown_model_is_a_404_that_names_the_served_one(name: str) -> None:
    async with serving() as server:
        status, error = await server.refused(CHAT, {"messages": HELLO, "model": name})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert MODEL in error["message"]


async def test_a_prompt_longer_than_the_context_names_both_numbers() -> None:
    async with serving(max_model_len=64) as server:
        status, error = await server.refused(COMPLETIONS, {"prompt": [1] * 70})
        assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
        assert "70" in error["message"]
        assert "64" in error["message"]
        status, error = await server.refused(CHAT, {"messages": [{"role": "user", "content": "a" * 70}]})
        assert (status, error["param"]) == (400, "messages")


async def test_an_answer_longer_than_the_context_names_the_limit_as_it_was_written() -> None:
    async with serving(max_model_len=64) as server:
        status, error = await server.refused(COMPLETIONS, {"prompt": [1] * 60, "max_tokens": 5})
        assert (status, error["param"]) == (400, "max_tokens")
        status, error = await server.refused(CHAT, {"messages": HELLO, "max_completion_tokens": 60})
        assert (status, error["param"]) == (400, "max_completion_tokens")
        status, error = await server.refused(CHAT, {"messages": HELLO, "max_completion_tokens": 5, "max_tokens": 6})
        assert (status, error["param"]) == (400, "max_tokens")


async def test_what_can_never_fit_the_pool_is_refused_at_once() -> None:
    async with serving(info={"total_slots": 20}) as server:
        status, error = await server.refused(COMPLETIONS, {"prompt": [1] * 10, "max_tokens": 30})
    assert (status, error["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("value", ["high", "1.5", "-0.5", "nan", ""])
async def test_a_bad_confidence_header_is_named(value: str) -> None:
    async with serving() as server:
        headers = {"X-HAMburger-Confidence": value}
        status, error = await server.refused(CHAT, {"messages": HELLO}, headers=headers)
    assert (status, error["param"]) == (400, "X-HAMburger-Confidence")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_with_retry_after_before_any_stream(stream: bool) -> None:
    gate = StepGate()
    runner = ByChoice([[EOS]], gate=gate)
    async with serving(runner=runner, max_num_seqs=1, max_queue=1) as server:
        first = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a"}))
        await until(lambda: server.engine.health().num_waiting == 1)
        response = await server.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": stream})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["type"] == "rate_limit_error"
        assert server.engine.health().num_waiting == 1  # all or none
        assert server.metric("request_failure_total", code="429", reason="queue_full") == 1
        assert server.metric("request_failure_total", code="429") == 1
        gate.set()
        assert (await first).status_code == 200


async def test_more_answers_than_the_server_ever_admits_is_a_400_and_not_a_429() -> None:
    async with serving([[EOS]], max_num_seqs=1, max_queue=2) as server:
        assert len((await server.complete(prompt=["a"] * 3))["choices"]) == 3
        status, error = await server.refused(COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
        assert (status, error["param"]) == (400, "prompt")
        status, error = await server.refused(CHAT, {"messages": HELLO, "n": 4})
        assert (status, error["param"]) == (400, "n")


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_in_the_queue_is_a_503_also_for_a_stream(stream: bool) -> None:
    now = [0.0]
    gate = StepGate()
    runner = ByChoice([[97]] * 100, gate=gate)
    async with (
        serving(runner=runner, max_num_seqs=1, max_queue_seconds=5.0, clock=lambda: now[0]) as server,
        on_port(server.app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client,
    ):
        [blocker] = server.engine.submit([_request("blocker-0")])
        gate.step()
        await until(lambda: server.engine.health().num_running == 1)
        asking = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "stream": stream}))
        await until(lambda: server.engine.health().num_waiting == 1)
        now[0] = 6.0
        gate.set()
        response = await asking
        blocker.abort()
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert error_of(response)["code"] == "queue_timeout"


async def test_a_request_that_memory_does_not_hold_is_a_503_and_the_next_is_served() -> None:
    def trouble(step: int, batch: ScheduledBatch) -> bool:
        return any(97 in item.sequence.prompt_ids for item in batch.sequences)

    async with serving(runner=ByChoice([[EOS]], out_of_memory=trouble)) as server:
        response = await server.post(COMPLETIONS, {"prompt": "a"})
        assert (response.status_code, error_of(response)["code"]) == (503, "out_of_memory")
        assert int(response.headers["retry-after"]) >= 1
        assert (await server.complete(prompt="b"))["choices"]


async def test_draining_is_a_503() -> None:
    async with serving([[EOS]]) as server:
        server.engine.drain()
        response = await server.post(CHAT, {"messages": HELLO})
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert response.headers["connection"] == "close"
    assert error_of(response)["type"] == "service_unavailable"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_before_the_first_token_is_a_503(stream: bool) -> None:
    async with serving(runner=ByChoice([[97]] * 9, fail_at_step=1)) as server:
        status, error = await server.refused(CHAT, {"messages": HELLO, "stream": stream})
        assert (status, error["code"]) == (503, "engine_unavailable")
        assert (await server.refused(CHAT, {"messages": HELLO}))[0] == 503


@pytest.mark.parametrize("n", [1, 3])
async def test_an_error_inside_a_stream_is_one_event_and_done(n: int) -> None:
    async with serving(runner=ByChoice([[97]] * 9, fail_at_step=3)) as server:
        *chunks, last = await server.stream(CHAT, n=n, stream_options={"include_usage": True})
        assert server.metric("request_failure_total", code="503", reason="engine_unavailable") == 1
    assert last.keys() == {"error"}
    assert last["error"].keys() == {"message", "type", "param", "code"}
    assert 1 <= len(chunks) <= 2 * n  # a choice that came later has had a step less
    assert all("error" not in chunk for chunk in chunks)


async def test_a_bug_is_a_500_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(split("a", 1)) as server:
        monkeypatch.setattr(server.engine, "submit", lambda requests: 1 / 0)
        status, error = await server.refused(CHAT, {"messages": HELLO})
        assert server.metric("request_failure_total", code="500") == 1
    assert (status, error["type"]) == (500, "server_error")
    assert "division" not in error["message"]


def _request(request_id: str) -> GenerationRequest:
    return GenerationRequest(f"{request_id}-0", [1, 2], SamplingParams(max_tokens=100))


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "model": LONG}),
        (CHAT, {"messages": HELLO, "model": f"{MODEL}@{LONG}"}),
        (CHAT, {"messages": HELLO, "logit_bias": {LONG: 1}}),
        (CHAT, {"messages": HELLO, "logit_bias": {LONG: "1"}}),
        (CHAT, {"messages": [{"role": LONG, "content": "a"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": LONG}}}),
        (CHAT, {"messages": HELLO, "response_format": {"type": LONG}}),
        (CHAT, {"messages": HELLO, "structured_outputs": {"regex": f"({LONG}"}}),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {LONG: [1]}, "temperature": LONG}),
        (CHAT, {"messages": HELLO, "stop": [1, LONG]}),
        (f"/v1/{LONG}", {}),
    ],
)  # fmt: skip
async def test_an_error_repeats_little_of_what_was_sent(path: str, body: dict[str, Any]) -> None:
    async with serving() as server:
        response = await server.client.post(path, json=body)
        assert response.status_code in (400, 404)
        assert 20 < len(error_of(response)["message"]) < 600
