"""Spans of requests: whose trace, what lies within, which attributes; a real collector, a dead one, none at all."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fakes import EOS
from gates import StepGate
from hamburger.server.config import SettingsError
from hamburger.server.operation.tracing import RequestTraces, open_traces
from serving import CHAT, COMPLETIONS, HELLO, MODEL, ByChoice, serving, until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Spans:
    """What was sent so far."""

    def __init__(self) -> None:
        provider, self._exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = RequestTraces(provider)

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def one(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """That of the only request, and those within it, in their order."""
        [request] = [span for span in self.all if span.kind is SpanKind.SERVER]
        assert request.context is not None
        within = [span for span in self.all if span is not request]
        for span in within:
            assert span.parent is not None
            assert span.parent.span_id == request.context.span_id
        return request, sorted(within, key=lambda span: span.start_time or 0)


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    with closing(found.traces):
        yield found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_of_its_clients_trace(spans: Spans, stream: bool) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    async with serving([[*b"ab"], [*b"c"], [EOS]], traces=spans.traces) as server:
        began = time.time_ns()
        assert (await server.post(CHAT, {"messages": HELLO, "stream": stream}, headers=headers)).status_code == 200
        ended = time.time_ns()
    request, within = spans.one()
    assert (request.name, request.status.status_code) == (f"POST {CHAT}", StatusCode.UNSET)
    assert request.context is not None
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    attributes = dict(request.attributes or {})
    assert str(attributes.pop("gen_ai.response.id")).startswith("chatcmpl-")
    assert attributes == {
        "http.request.method": "POST", "url.path": CHAT, "http.route": CHAT, "http.response.status_code": 200,
        "client.address": "127.0.0.1", "gen_ai.operation.name": "chat", "gen_ai.request.model": MODEL,
        "gen_ai.request.choice.count": 1, "gen_ai.usage.input_tokens": len(b"user: hello\nassistant: "),
        "gen_ai.usage.output_tokens": 4, "gen_ai.response.finish_reasons": ("stop",),
        "hamburger.request_id": "mine", "hamburger.stream": stream, "hamburger.kv_slots": 3,
        "hamburger.tokens_per_kv": 1.3333, "hamburger.macro_steps": 3, "hamburger.tokens_per_step": 1.3333,
        "hamburger.drafted_tokens": 0, "hamburger.accepted_tokens": 0, "hamburger.cached_tokens": 0,
        "hamburger.client_left": False,
    }  # fmt: skip
    assert [span.name for span in within] == ["prepare", "queue", "prefill", "decode"]
    edges = [request.start_time or 0, *(span.start_time or 0 for span in within[1:]), request.end_time or 0]
    assert edges == sorted(edges)
    assert [(span.start_time, span.end_time) for span in within] == [*pairwise(edges)]
    assert began - 10**7 < edges[0] < edges[-1] < ended + 10**7


async def test_reasons_of_several_answers_are_a_list(spans: Spans) -> None:
    async with serving(runner=ByChoice([[97], [EOS]], [[97]] * 9), traces=spans.traces) as server:
        await server.complete(prompt="a", n=2, max_tokens=3)
    request, _ = spans.one()
    assert (request.attributes or {})["gen_ai.response.finish_reasons"] == ("length", "stop")


async def test_without_a_parent_each_request_begins_a_trace(spans: Spans) -> None:
    async with serving([[EOS]], traces=spans.traces) as server:
        for header in ({}, {"traceparent": "00-nonsense"}):
            await server.post(COMPLETIONS, {"prompt": "a"}, headers=header)
    requests = [span for span in spans.all if span.kind is SpanKind.SERVER]
    assert [span.parent for span in requests] == [None, None]
    assert len({span.context.trace_id for span in requests if span.context is not None}) == 2


async def test_a_trace_that_is_not_sampled_is_not_sent(spans: Spans) -> None:
    async with serving([[EOS]], traces=spans.traces) as server:
        await server.post(COMPLETIONS, {"prompt": "a"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert spans.all == []


async def test_refused_requests_say_why_and_reach_no_engine(spans: Spans) -> None:
    async with serving(traces=spans.traces) as server:
        await server.post(COMPLETIONS, {"prompt": 7})
    request, within = spans.one()
    assert within == []
    attributes = request.attributes or {}
    assert (attributes["http.response.status_code"], attributes["hamburger.param"]) == (400, "prompt")
    assert request.status.status_code is StatusCode.UNSET  # the client's fault is no error of the server


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_died_is_an_error_also_inside_a_stream(spans: Spans, stream: bool) -> None:
    async with serving(runner=ByChoice([[97]] * 9, fail_at_step=3), traces=spans.traces) as server:
        answer = await server.client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert answer.status_code == (200 if stream else 503)
    request, within = spans.one()
    assert request.status.status_code is StatusCode.ERROR
    assert (request.attributes or {})["error.type"] == "engine_unavailable"
    assert [span.name for span in within] == ["prepare", "queue", "prefill", "decode"]


async def test_a_client_that_leaves_in_the_queue_was_never_prefilled(spans: Spans) -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97]] * 9, gate=gate), traces=spans.traces) as server:
        answer = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a"}))
        await until(lambda: server.engine.load_of("").num_open == 1)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        gate.set()
    request, within = spans.one()
    assert [span.name for span in within] == ["prepare", "queue"]
    assert request.end_time == within[-1].end_time


async def test_probes_have_no_spans_and_unknown_paths_no_route(spans: Spans) -> None:
    async with serving(traces=spans.traces) as server:
        for path in ("/health", "/ready", "/metrics", "/v1/responses/resp_1", "/elsewhere"):
            await server.client.get(path)
    assert [span.name for span in spans.all] == ["GET /v1/responses/{response_id}", "GET"]


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A collector's address, and the paths and bodies that it was sent."""
    taken: list[tuple[str, bytes]] = []

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """To nobody."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Taking) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", taken
        server.shutdown()


@pytest.mark.parametrize(("path", "sent_to"), [("", "/v1/traces"), ("/v1/traces", "/v1/traces"), ("/mine", "/mine")])
async def test_a_collector_is_sent_all_before_the_end(monkeypatch: pytest.MonkeyPatch, path: str, sent_to: str) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with collector() as (url, taken):
        with closing(open_traces(url + path)) as traces:
            async with serving([[EOS]], traces=traces) as server:
                await server.post(COMPLETIONS, {"prompt": "a"})
        [(where, body)] = taken
    assert where == sent_to
    [sent] = ExportTraceServiceRequest.FromString(body).resource_spans
    named = {pair.key: pair.value.string_value for pair in sent.resource.attributes}
    assert (named["service.name"], named["deployment.environment"]) == ("hamburger-serve", "test")
    names = [span.name for scope in sent.scope_spans for span in scope.spans]
    assert sorted(names) == [f"POST {COMPLETIONS}", "decode", "prefill", "prepare", "queue"]


async def test_a_dead_collector_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    began = time.monotonic()
    with closing(open_traces("http://127.0.0.1:9")) as traces:
        async with serving([[EOS]], traces=traces) as server:
            assert (await server.post(COMPLETIONS, {"prompt": "a"})).status_code == 200
            assert time.monotonic() - began < 5
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "http://", ""])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=r"otlp_traces_endpoint is .*OTLP over HTTP"):
        open_traces(endpoint)


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"hamburger-serve\[otel\]"):
        open_traces("http://127.0.0.1:4318")
