"""What Prometheus sees of the engine and of failed answers; what of LoRA adapters, adapter_metrics.py says.

It listens (EngineObserver) and decides nothing. docs/metrics.md says what each metric means; a test compares. Each app
has a registry of its own. Gauges are computed when they are read, so that they fall to zero with the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.process_usage import resident_bytes
from hamburger.engine.types.messages import CheckedDrafts, StepStats
from hamburger.engine.types.observer import EndReason, RequestTimings
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.server.operation.adapter_metrics import AdapterMetrics
from hamburger.server.operation.recent_groups import RecentGroups

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LABELS = ("model_name", "engine")
M = TypeVar("M", Counter, Gauge, Histogram)

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0, 2.5, 10.0)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
_CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_DRAFTERS = ("micro", "lookup", "prediction", "grammar")  # a plain base has not the first
# They begin at 0, and so do drafts: of a counter that is not there yet, Prometheus does not see the first ones come.
_EXPECTED_FAILURES = (
    *(("400", ""), ("400", "context_length_exceeded"), ("401", "invalid_api_key"), ("404", "model_not_found")),
    *(("429", "queue_full"), ("429", "rate_limit_exceeded"), ("500", ""), ("503", "engine_unavailable")),
    *(("503", "queue_timeout"), ("503", "out_of_memory"), ("503", "too_many_connections")),
)
_MOST_UNCOUNTED = 64  # steps, and groups, that wait to be counted
_POOL = (
    "block_size", "total_slots", "expected_tokens", "max_model_len", "device", "dtype", "quantization",
    "kv_cache_dtype", "groups",
)  # fmt: skip


class ServerMetrics:
    """An EngineObserver. `model_name` is the served one, `engine` tells engines of one model apart.

    beside: the metrics of another model of the same server. Their families are one, and either renders both.
    """

    def __init__(self, model_name: str, engine: str = "0", *, beside: ServerMetrics | None = None) -> None:
        self._registry: CollectorRegistry = CollectorRegistry() if beside is None else beside._registry
        self._families: dict[str, Any] = {} if beside is None else beside._families
        self._values = (model_name, engine)
        self._recent = RecentGroups(time.monotonic)
        self._used_share = 0.0
        self._pool: tuple[str, ...] | None = None  # that is told
        # Counted many at a time: beside an engine, whose weights drive all else out of the caches, one costs as ten do.
        self._uncounted_steps: list[StepStats] = []
        self._uncounted_gaps: list[tuple[float, int]] = []
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._macro_steps = self._counter("macro_steps", "Engine steps x sequences decoded in them.")
        slots = self._family("kv_slots", "KV slots computed, without rejected drafts.", ("kind",))
        self._prompt_slots = slots.labels(*self._values, "prompt")
        self._generated_slots = slots.labels(*self._values, "generated")
        self._settled_tokens = self._counter("settled_tokens", "Old tokens of answers that settled.")
        self._dropped_slots = self._counter("dropped_slots", "KV slots that they gave back.")
        self._completed = self._counter("request_completed", "Requests of clients all of whose answers ended.")
        self._success = self._family("request_success", "Finished answers.", ("finished_reason",))
        for reason in ("stop", "length", "abort"):
            self._success.labels(*self._values, reason)
        text = "Answers with an error, by HTTP status and the error's own code."
        self._failure = self._family("request_failure", text, ("code", "reason"))
        for failure in _EXPECTED_FAILURES:
            self._failure.labels(*self._values, *failure)
            if beside is not None:
                self._failure.labels("", engine, *failure)
        drafts = ("drafter", "position")
        self._drafted = self._family("drafted_tokens", "Tokens drafted for a macro-step, which checked them.", drafts)
        self._accepted = self._family("accepted_tokens", "Those of them that are in the answer.", drafts)
        self._engine: AsyncEngine | None = None
        labels = (*_LABELS, "lora_name")
        self._adapters = AdapterMetrics(
            self._values,
            self._family("adapter_requests", "Ended requests, by LoRA adapter.", ("lora_name",)),
            self._family("adapter_tokens", "Tokens of requests, by LoRA adapter.", ("lora_name", "kind")),
            self._once(Gauge, "adapter_requests_open", "Requests not ended, by LoRA adapter.", labels),
        )
        self._models: list[ServerMetrics] = [] if beside is None else beside._models
        self._models.append(self)
        self._preemptions = self._counter("num_preemptions", "Sequences that gave their blocks up for a while.")
        self._cache_queries = self._counter("prefix_cache_queries", "Slots looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Slots found in the prefix cache.")
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._token_gap = self._histogram(
            "inter_token_latency_seconds", "Per token: the gap before a group, shared among its tokens.", _SHORT_SECONDS
        )
        self._step_seconds = self._histogram("macro_step_seconds", "One engine step.", _SHORT_SECONDS)
        self._group_size = self._histogram("group_size", "Tokens of a group, after trimming.", _GROUP_SIZES)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first slots, or giving up.", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "First slots to first token.", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "First token to end.", _SECONDS)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _COUNTS)
        self._request_generated = self._histogram("request_generation_tokens", "Tokens generated for it.", _COUNTS)
        self._confidence = self._histogram("request_confidence", "The confidence a request ran with.", _CONFIDENCES)
        self._loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "How late the server's event loop woke a task, ten times a second.",
            _SHORT_SECONDS,
        )
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Prompt slots computed and tokens generated in one engine step.", _COUNTS
        )

    def on_loop_lag(self, seconds: float) -> None:
        """A task of the server was woken so much later than it asked; of all models together, so of the first."""
        self._loop_lag.observe(seconds)

    def add_gauges(self, engine: AsyncEngine) -> None:
        """Add the gauges, which read the engine's state whenever they are scraped."""
        info, self._engine = engine.info, engine
        self._adapters.follow(engine.open_by_lora)
        self._gauge("num_requests_running", "Requests that hold KV slots.", lambda: engine.health().num_running)
        self._gauge("num_requests_waiting", "Requests in the queue.", lambda: engine.health().num_waiting)
        self._gauge("max_requests_running", "Most requests that may run at once.", lambda: engine.info.max_num_seqs)
        self._gauge("max_requests_waiting", "Most requests that may wait.", lambda: engine.max_queue)
        self._gauge("kv_cache_usage_perc", "Used slots / all slots of the pool, 0 to 1.", lambda: self._used_share)
        self._gauge("engine_start_time_seconds", "When the engine became ready, Unix time.", lambda: engine.ready_at)
        self._gauge("tokens_per_kv_ratio", "Tokens / KV slots over the last minute.", self._recent.tokens_per_kv)
        self._gauge(
            "tokens_per_macro_step", "Tokens / groups over the last minute.", self._recent.tokens_per_macro_step
        )
        self._gauge("generation_tokens_per_second", "Over the last seconds.", self._recent.tokens_per_second)
        self._gauge("confidence_in_force", "What a request that leaves it to the server would get.", engine.confidence)
        memory = self._once(Gauge, "resident_memory_bytes", "Of a process.", (*_LABELS, "process"))
        if engine.pid != os.getpid():
            memory.labels(*self._values, "engine").set_function(lambda: resident_bytes(engine.pid))
        if self is self._models[0]:  # all models share it
            memory.labels(*self._values, "server").set_function(resident_bytes)
        if info.groups == "verified":
            for drafter in _DRAFTERS[info.is_plain_base :]:
                for position in range(1, info.max_group):
                    for family in (self._drafted, self._accepted):
                        family.labels(*self._values, drafter, str(position))
        self._tell_pool()

    def _tell_pool(self) -> None:
        """Of the engine that is there: one that was started anew may have found less memory."""
        if self._engine is None:
            return
        shape = tuple(str(getattr(self._engine.info, name)) for name in _POOL)
        if shape == self._pool:
            return
        family = self._once(Gauge, "cache_config_info", "The KV pool's shape.", (*_LABELS, *_POOL))
        if self._pool is not None:
            family.remove(*self._values, *self._pool)
        self._pool = shape
        family.labels(*self._values, *shape).set(1)

    def render(self) -> bytes:
        """The text that Prometheus scrapes. It tells once more of adapters that are gone, then never again."""
        for model in self._models:
            model._count()
            model._tell_pool()
        gone = [(model, model._adapters.update()) for model in self._models]
        text = generate_latest(self._registry)
        for model, names in gone:
            model._adapters.forget(names)
        return text

    def on_failure(self, status: int, reason: str | None) -> None:
        """An error left the server, as an answer or inside a stream. reason: its `code`, one of few."""
        self._failure.labels(*self._values, str(status), reason or "").inc()

    def on_failure_of_no_model(self, status: int, reason: str | None) -> None:
        """An error left the server for a request that named none of several models: it has no model_name."""
        self._failure.labels("", self._values[1], str(status), reason or "").inc()

    def on_step(self, stats: StepStats) -> None:
        self._used_share = stats.used_slots / stats.total_slots
        if stats.group_sizes:
            num_slots = stats.generated_slots - stats.dropped_slots
            self._recent.add(sum(stats.group_sizes), num_slots, len(stats.group_sizes))
        self._uncounted_steps.append(stats)
        if len(self._uncounted_steps) >= _MOST_UNCOUNTED:
            self._count()

    def on_group(self, gap_seconds: float | None, num_tokens: int) -> None:
        if gap_seconds is not None and num_tokens:
            self._uncounted_gaps.append((gap_seconds / num_tokens, num_tokens))
            if len(self._uncounted_gaps) >= _MOST_UNCOUNTED:
                self._count()

    def _count(self) -> None:
        for stats in self._uncounted_steps:
            self._count_step(stats)
        for gap_seconds, num_tokens in self._uncounted_gaps:
            for _ in range(num_tokens):
                self._token_gap.observe(gap_seconds)
        self._uncounted_steps.clear()
        self._uncounted_gaps.clear()

    def _count_step(self, stats: StepStats) -> None:
        self._preemptions.inc(stats.num_preemptions)
        self._cache_queries.inc(stats.cache_queries)
        self._cache_hits.inc(stats.cache_hits)
        self._settled_tokens.inc(stats.settled_tokens)
        self._dropped_slots.inc(stats.dropped_slots)
        num_tokens = sum(stats.group_sizes)
        if not stats.prompt_slots and not stats.decoded_sequences:
            return  # it only reports the state
        self._step_seconds.observe(stats.seconds)
        self._iteration_tokens.observe(stats.prompt_slots + num_tokens)
        self._prompt_slots.inc(stats.prompt_slots)
        if stats.group_sizes:
            self._generation_tokens.inc(num_tokens)
            self._generated_slots.inc(stats.generated_slots)
            self._macro_steps.inc(stats.decoded_sequences)
            for size in stats.group_sizes:
                self._group_size.observe(size)
            for drafts in stats.drafts:
                self._count_drafts(drafts)

    def _count_drafts(self, drafts: CheckedDrafts) -> None:
        """Positions count from 1. Beside each drafted there is an accepted, if 0: so that they can be divided."""
        for position in range(1, len(drafts.token_ids) + 1):
            labels = (*self._values, drafts.drafter, str(position))
            self._drafted.labels(*labels).inc()
            self._accepted.labels(*labels).inc(position <= drafts.num_accepted)

    def on_start(self, prompt_tokens: int, timings: RequestTimings, lora: str | None) -> None:
        assert timings.scheduled is not None
        assert timings.first_token is not None
        self._prompt_tokens.inc(prompt_tokens)
        self._request_prompt.observe(prompt_tokens)
        self._adapters.count_tokens(lora, "prompt", prompt_tokens)
        self._queue.observe(timings.scheduled - timings.arrival)
        self._prefill.observe(timings.first_token - timings.scheduled)
        self._first_token.observe(timings.first_token - timings.arrival)

    def on_finish(
        self,
        reason: EndReason,
        params: SamplingParams,
        prompt_tokens: int,
        completion_tokens: int,
        timings: RequestTimings,
        lora: str | None,
    ) -> None:
        self._adapters.count_request(lora)
        self._adapters.count_tokens(lora, "generated", completion_tokens)
        if reason not in ("error", "timeout"):  # counted by the status of what the client is told: on_failure
            self._success.labels(*self._values, reason).inc()
        self._e2e.observe(timings.finished - timings.arrival)
        self._request_generated.observe(completion_tokens)
        if params.confidence is not None:
            self._confidence.observe(params.confidence)
        if timings.first_token is not None:
            self._decode.observe(timings.finished - timings.first_token)
        else:
            self._request_prompt.observe(prompt_tokens)
        if reason == "timeout":  # left out, the longer the queue is the better it would look
            self._queue.observe(timings.finished - timings.arrival)

    def on_completed(self) -> None:
        """All answers of a client's request have ended, none with an error."""
        self._completed.inc()

    def _family(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return self._once(Counter, name, text, (*_LABELS, *labels))

    def _counter(self, name: str, text: str) -> Counter:
        return self._once(Counter, name, text).labels(*self._values)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._once(Gauge, name, text).labels(*self._values).set_function(read)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._once(Histogram, name, text, buckets=buckets).labels(*self._values)

    def _once(self, kind: type[M], name: str, text: str, labels: Sequence[str] = _LABELS, **options: Any) -> M:
        """The family of that name, made by the first model that asks for it."""
        if name not in self._families:
            self._families[name] = kind(f"hamburger_{name}", text, labels, registry=self._registry, **options)
        family: M = self._families[name]
        return family
