"""Spans of OpenTelemetry: one for each request, and within it what its answer waited for. Never its text.

A span is made when its request has ended, from its entry (request_log.py), so nothing is held while it runs. Names of
attributes are OpenTelemetry's for HTTP and generative models, where it has one (docs/operations.md lists them).
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from hamburger.server.config import SettingsError
from hamburger.server.operation.request_log import PROBES, RequestEntry, fields_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0

_NAMED_BY_OPENTELEMETRY = {
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "client": "client.address",
    "error": "error.type",
    "model": "gen_ai.request.model",
    "answer_id": "gen_ai.response.id",
    "choices": "gen_ai.request.choice.count",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}
_OURS = (
    "request_id", "key", "stream", "kv_slots", "tokens_per_kv", "macro_steps", "tokens_per_step", "drafted_tokens",
    "accepted_tokens", "cached_tokens", "param", "client_left",
)  # fmt: skip
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


class _Part(NamedTuple):
    """A child span; seconds of time.monotonic()."""

    name: str
    start: float
    end: float


class RequestTraces:
    """Makes the spans of requests that have ended, and hands them to a provider, which it closes."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("hamburger.server", importlib.metadata.version("hamburger-serve"))
        self._propagator = TraceContextTextMapPropagator()

    def add(self, entry: RequestEntry, scope: Scope) -> None:
        """Of a request that has just ended. It belongs to the trace that its `traceparent` header names, if any."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if scope["path"] in PROBES:
            return
        now, fields = time.monotonic(), fields_of(entry, scope)
        ended = time.time_ns()

        def wall(moment: float) -> int:
            return ended - round((now - moment) * 1e9)

        route = getattr(scope.get("route"), "path", "")
        span = self._tracer.start_span(
            f"{fields['method']} {route}".strip(),
            self._propagator.extract(dict(Headers(scope=scope))),
            SpanKind.SERVER,
            _attributes(fields, route),
            start_time=wall(entry.started),
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for part in _parts(entry, now):
                self._tracer.start_span(part.name, inside, start_time=wall(part.start)).end(wall(part.end))
            if (entry.status if entry.failure is None else entry.failure.status) >= 500:
                span.set_status(Status(StatusCode.ERROR))
        span.end(ended)

    def close(self) -> None:
        """Hand over what is left, where the collector takes it soon."""
        closing = threading.Thread(target=self._provider.shutdown, name="hamburger-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("The collector of otlp_traces_endpoint takes nothing: the last spans are lost.")


def open_traces(endpoint: str) -> RequestTraces:
    """Traces for a collector at an OTLP/HTTP URL; `/v1/traces` is the path of one without.

    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and their like hold as
    ever. Raises SettingsError for something that is no such URL, for one that holds a password, and where OpenTelemetry
    is not installed.
    """
    host, *_ = re.split("[/?#]", endpoint.partition("://")[2] or endpoint)
    if "@" in host:  # not shown: the settings are logged, a password must not be
        raise SettingsError(
            "otlp_traces_endpoint holds a user or password (...@host), which the log would show: leave it out, and set "
            "OTEL_EXPORTER_OTLP_HEADERS (such as Authorization=Basic%20...)."
        )
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise SettingsError(
            f"otlp_traces_endpoint is {endpoint!r}: it must be the URL of a collector that takes OTLP over HTTP, such "
            "as http://127.0.0.1:4318/v1/traces."
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'hamburger-serve[otel]', or in a clone "
            "pip install '.[otel]'."
        ) from error
    if url.path in ("", "/"):
        endpoint = url._replace(path="/v1/traces").geturl()
    named = OTELResourceDetector().detect().attributes
    resource = Resource.create({SERVICE_NAME: named.get(SERVICE_NAME, "hamburger-serve")})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return RequestTraces(provider)


def _attributes(fields: dict[str, Any], route: str) -> dict[str, Any]:
    values: dict[str, Any] = {name: fields[field] for field, name in _NAMED_BY_OPENTELEMETRY.items()}
    values |= {f"hamburger.{field}": fields[field] for field in _OURS}
    values |= {"http.route": route or None, "gen_ai.operation.name": _OPERATIONS.get(route)}
    if fields["finish_reason"] is not None:
        values["gen_ai.response.finish_reasons"] = fields["finish_reason"].split(",")
    return {name: value for name, value in values.items() if value is not None}


def _parts(entry: RequestEntry, ended: float) -> list[_Part]:
    """What a request that reached the engine spent its time on, one after the other."""
    if entry.moments is None:
        return []
    moments = entry.moments()
    found = [("prepare", entry.started), ("queue", moments.arrival)]
    if moments.scheduled is not None and moments.first_token is not None:
        found += [("prefill", moments.scheduled), ("decode", moments.first_token)]
    ends = [start for _, start in found[1:]] + [ended]
    return [_Part(name, start, end) for (name, start), end in zip(found, ends, strict=True)]
