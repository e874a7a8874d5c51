"""What `hamburger bench` tells of the loads that it measured: tables for people, JSON for programs."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hamburger.clients.figures import Answer, Distribution, Summary

_MOST_REASONS = 10  # of failures that are listed, the most frequent first
_BUSY = 0.4
COUNTED_BY = {
    "usage": "the server's usage",
    "groups": "the groups in the stream (the server sent no usage)",
    "events": "one token an event with text (the server sent neither usage nor groups)",
}


@dataclass(frozen=True, slots=True)
class Level:
    """One load to measure: `concurrency` requests in flight, or `request_rate` requests/s; one of them is None."""

    concurrency: int | None
    request_rate: float | None
    confidence: float | None  # None: the server's default

    @property
    def load(self) -> str:
        return f"{self.concurrency} in flight" if self.request_rate is None else f"{self.request_rate:g} req/s"

    @property
    def confidence_text(self) -> str:
        return "default" if self.confidence is None else f"{self.confidence:g}"

    def num_requests(self, asked: int | None) -> int:
        """`asked`, at least as many as are to be in flight, or enough to fill the level four times, at least 8 (open
        loop: 32)."""
        if self.concurrency is None:
            return asked or 32
        return max(asked, self.concurrency) if asked else max(8, 4 * self.concurrency)


@dataclass(frozen=True, slots=True)
class Measured:
    """busy: the share of the time in which this client itself computed."""

    level: Level
    answers: list[Answer]
    summary: Summary
    busy: float


def print_tables(out: Console, measured: list[Measured], title: str, seed: int) -> None:
    """What people read: throughput, steps, latencies, and what went wrong or could mislead."""
    throughput, steps, latency = (Table(box=SIMPLE, pad_edge=False) for _ in range(3))
    for name in ("load", "conf."):
        for table in (throughput, steps, latency):
            table.add_column(name, no_wrap=True)
    for name in ("ok", "failed", "req/s", "output tok/s", "total tok/s"):
        throughput.add_column(name, justify="right", overflow="fold")  # a figure is never cut
    for name in ("tokens/KV", "tokens/step", "drafted", "accepted"):
        steps.add_column(name, justify="right", overflow="fold")
    latency.add_column("ms")
    for name in ("mean", "p50", "p90", "p99"):
        latency.add_column(name, justify="right", overflow="fold")
    for m in measured:
        s, labels = m.summary, (m.level.load, m.level.confidence_text)
        rates = (s.requests_per_second, s.output_tokens_per_second, s.total_tokens_per_second)
        throughput.add_row(*labels, str(s.ok), str(sum(s.failures.values())), *(_number(rate) for rate in rates))
        drafts = ("-", "-") if s.acceptance is None else (f"{s.drafted_tokens:,}", f"{s.acceptance:.0%}")
        steps.add_row(*labels, _number(s.tokens_per_kv), _number(s.tokens_per_step), *drafts)
        for name, values in (("TTFT", s.ttft), ("TPOT", s.tpot), ("ITL", s.itl), ("E2E", s.e2e)):
            latency.add_row(*labels, name, *_milliseconds(values), end_section=name == "E2E")
            labels = ("", "")
    out.print(title, markup=False, soft_wrap=True)
    out.print(throughput)
    if any(m.summary.tokens_per_kv is not None for m in measured):
        out.print(steps)
    out.print(latency)
    for m in measured:
        for reason, times in list(m.summary.failures.items())[:_MOST_REASONS]:
            out.print(f"{m.level.load}: {times} failed: {reason}", style="red", markup=False, soft_wrap=True)
        if (more := len(m.summary.failures) - _MOST_REASONS) > 0:
            out.print(f"{m.level.load}: {more} more reasons, each as often or less", style="red", markup=False)
        if m.busy > _BUSY:
            out.print(
                f"{m.level.load}: this client itself computed {m.busy:.0%} of the time: its figures may not be the "
                "server's. Measure with less at a time, or from several processes.",
                style="yellow",
                soft_wrap=True,
            )
        if m.summary.cached_tokens and m.summary.prompt_tokens:
            share = m.summary.cached_tokens / m.summary.prompt_tokens
            out.print(f"{m.level.load}: {share:.0%} of the prompts' tokens were in the server's prefix cache.")
    for source in sorted({m.summary.counted_by for m in measured if m.summary.ok}):
        out.print(f"Tokens are counted by {COUNTED_BY[source]}.", style="dim")
    out.print(f"Prompts and times are those of --seed {seed}.", style="dim")


def report(args: argparse.Namespace, model: str, measured: list[Measured], seed: int) -> dict[str, Any]:
    """Everything that was measured, for JSON; times in seconds. Names no key."""
    names = ("endpoint", "requests", "warm_up", "output_tokens", "ignore_eos", "groups")
    return {
        "url": args.url,
        "model": model,
        "asked": {
            **{name: getattr(args, name) for name in names},
            "seed": seed,
            "prompt_tokens": None if args.dataset else args.prompt_tokens,
            "dataset": str(args.dataset) if args.dataset else None,
        },
        "percentiles": "linear interpolation between closest ranks",
        "levels": [
            {
                **asdict(m.level),
                **asdict(m.summary),
                "client_busy": m.busy,
                "requests": _requests(m.answers),
            }
            for m in measured
        ],
    }


def _requests(answers: list[Answer]) -> list[dict[str, Any]]:
    first = min(answer.started for answer in answers)
    return [_request(answer, first) for answer in answers]


def _request(answer: Answer, start: float) -> dict[str, Any]:
    """One request's figures; `arrivals` are [seconds after it was sent, tokens]."""
    return {
        "sent": answer.started - start,
        "ttft": answer.ttft,
        "tpot": answer.tpot,
        "e2e": answer.e2e,
        "prompt_tokens": answer.usage.prompt_tokens if answer.usage else None,
        "cached_tokens": answer.usage.cached_tokens if answer.usage else None,
        "completion_tokens": answer.completion_tokens,
        "kv_slots": answer.kv_slots,
        "macro_steps": answer.macro_steps,
        "drafted_tokens": answer.num_drafted,
        "accepted_tokens": answer.num_accepted,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "arrivals": [[when - answer.started, tokens] for when, tokens in answer.arrivals],
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _milliseconds(values: Distribution | None) -> list[str]:
    if values is None:
        return ["-"] * 4
    return [f"{1000 * value:,.2f}" for value in (values.mean, values.p50, values.p90, values.p99)]
