"""What one streamed answer and many of them measured: pure arithmetic on times (seconds) and token counts.

No clock, no HTTP: whoever reads the wire says when something arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hamburger.clients.wire import StreamEvent, Usage


@dataclass(slots=True)
class Answer:
    """The timing of one streamed answer. `started`: when its request was sent; all times are of one clock, in seconds.

    arrivals: (time, tokens) of every event that brought tokens: a group's size where the server reports groups, else
        1 for every event with text.
    """

    started: float
    first: float | None = None  # first and last event that carried output
    last: float | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_groups: int = 0
    num_slots: int = 0  # of these groups
    num_drafted: int | None = None  # tokens that were drafted, None where the server tells of none, and accepted ones
    num_accepted: int | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    ended: float | None = None  # the connection is done with
    error: str | None = None  # why it failed
    remedy: str = ""  # and what helps

    def add(self, event: StreamEvent, now: float) -> None:
        """Account for an event that arrived at `now`."""
        self.usage = event.usage or self.usage
        self.finish_reason = event.finish_reason or self.finish_reason
        if not event.carries_output:
            return
        self.first = now if self.first is None else self.first
        self.last = now
        if event.token_ids:
            self.num_groups += 1
            # Only verified groups have drafts; each of their tokens has a slot of its own.
            self.num_slots += 1 if event.num_drafted is None else len(event.token_ids)
            self.arrivals.append((now, len(event.token_ids)))
        elif (event.text or event.thought) and not self.num_groups:
            self.arrivals.append((now, 1))
        if event.num_drafted is not None:
            self.num_drafted = (self.num_drafted or 0) + event.num_drafted
            self.num_accepted = (self.num_accepted or 0) + event.num_accepted

    @property
    def counted_by(self) -> Literal["usage", "groups", "events"]:
        """Where `completion_tokens` comes from: the best source that the server offers."""
        if self.usage is not None and self.usage.completion_tokens:  # proxies fill in zeros
            return "usage"
        return "groups" if self.num_groups else "events"

    @property
    def completion_tokens(self) -> int:
        if self.usage is not None and self.usage.completion_tokens:
            return self.usage.completion_tokens
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def kv_slots(self) -> int | None:
        """KV slots of the answer, or None where the server speaks of none."""
        if self.usage is not None and self.usage.kv_slots is not None:
            return self.usage.kv_slots
        return self.num_slots or None

    @property
    def macro_steps(self) -> int | None:
        """Groups emitted, each by one pass of the model, or None where the server speaks of none."""
        if self.usage is not None and self.usage.macro_steps is not None:
            return self.usage.macro_steps
        return self.num_groups or None

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first is None else self.first - self.started

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1); None for fewer than two tokens."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """From sending the request to the end of its answer."""
        return None if self.ended is None else self.ended - self.started

    @property
    def inter_token_latencies(self) -> list[float]:
        """One latency a token after the first arrival: the gap before a group, shared equally among its tokens."""
        latencies = []
        for (before, _), (now, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            latencies += [(now - before) / tokens] * tokens
        return latencies


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of some values, in the values' unit."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution | None:
        """Of all values that are not None; None when there are none."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        return cls(sum(known) / len(known), percentile(known, 50), percentile(known, 90), percentile(known, 99))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one level of load. Rates and latencies (seconds) are of the requests that succeeded.

    seconds: from the first request sent to the last one ended.
    total_tokens_per_second, tokens_per_kv, tokens_per_step: None where the server's usage does not say.
    cached_tokens: of the prompts, which the server's prefix cache had; None where no usage says.
    drafted_tokens, accepted_tokens, acceptance: of the answers whose groups tell of drafts; None where none does.
    counted_by: the weakest source among the answers' token counts.
    """

    ok: int
    failures: dict[str, int]  # reason -> requests
    seconds: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    kv_slots: int | None
    macro_steps: int | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    counted_by: Literal["usage", "groups", "events"]
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float | None
    tokens_per_kv: float | None
    tokens_per_step: float | None
    acceptance: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None


def summarise(answers: Sequence[Answer]) -> Summary:
    """The figures of answers that have all ended; at least one."""
    good = [answer for answer in answers if answer.error is None]
    seconds = max(answer.ended or answer.started for answer in answers) - min(answer.started for answer in answers)
    output_tokens = sum(answer.completion_tokens for answer in good)
    prompt_tokens = _sum_if_all_known(answer.usage.prompt_tokens if answer.usage else None for answer in good)
    kv_slots = _sum_if_all_known(answer.kv_slots for answer in good)
    macro_steps = _sum_if_all_known(answer.macro_steps for answer in good)
    cached = [answer.usage.cached_tokens for answer in good if answer.usage and answer.usage.cached_tokens is not None]
    told = [answer for answer in good if answer.num_drafted is not None]
    drafted = _sum_if_all_known(answer.num_drafted for answer in told)
    accepted = _sum_if_all_known(answer.num_accepted for answer in told)
    per_second = 1 / seconds if seconds > 0 else 0.0
    sources: tuple[Literal["events", "groups", "usage"], ...] = ("events", "groups", "usage")
    return Summary(
        ok=len(good),
        failures=dict(Counter(answer.error for answer in answers if answer.error is not None).most_common()),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        kv_slots=kv_slots,
        macro_steps=macro_steps,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        counted_by=next((s for s in sources if any(answer.counted_by == s for answer in good)), "usage"),
        requests_per_second=len(good) * per_second,
        output_tokens_per_second=output_tokens * per_second,
        total_tokens_per_second=None if prompt_tokens is None else (prompt_tokens + output_tokens) * per_second,
        tokens_per_kv=ratio(output_tokens, kv_slots),
        tokens_per_step=ratio(output_tokens, macro_steps),
        acceptance=ratio(accepted, drafted),
        ttft=Distribution.of(answer.ttft for answer in good),
        tpot=Distribution.of(answer.tpot for answer in good),
        itl=Distribution.of(latency for answer in good for latency in answer.inter_token_latencies),
        e2e=Distribution.of(answer.e2e for answer in good),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile of ascending, non-empty values, by linear interpolation between closest ranks.

    The value at rank `percent / 100 * (n - 1)`, counted from 0: numpy's default method.
    """
    rank = percent / 100 * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator, or None where either is unknown or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


def _sum_if_all_known(values: Iterable[int | None]) -> int | None:
    """The sum, or None when there are no values or any of them is None."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if listed and len(known) == len(listed) else None
