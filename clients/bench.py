"""`hamburger bench`: load on any OpenAI-compatible server, and the figures that users feel.

Arguments, levels and output; load.py sends the requests, and figures.py computes.
Speaks HTTP only; must not import hamburger.server, engine or model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hamburger.clients.arguments import (
    MOST_IN_FLIGHT,
    add_server_arguments,
    count,
    file_path,
    list_of,
    positive,
    unit_interval,
    waiting_time,
    whole,
    whole_to,
)
from hamburger.clients.figures import Answer, Distribution, Summary, summarise
from hamburger.clients.load import Job, allow_many_connections, closed_loop, open_loop, poisson_offsets
from hamburger.clients.output_files import check_apart, check_output, write_output
from hamburger.clients.prompts import FACTS, endless_prompts, read_prompts
from hamburger.clients.wire import RequestError, client_options, first_model, transport_error

WORDS_PER_TOKEN = 0.75  # of English, where the server has no /tokenize to ask
MOST_REQUESTS, MOST_PROMPT_TOKENS = 100_000, 1_000_000  # more than one client's memory is for
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
        """`asked`, or enough to fill the level four times, at least 8 (open loop: 32)."""
        return asked or (32 if self.concurrency is None else max(8, 4 * self.concurrency))


@dataclass(frozen=True, slots=True)
class Measured:
    level: Level
    answers: list[Answer]
    summary: Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger bench`."""
    add_server_arguments(parser)
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=list_of(whole_to(MOST_IN_FLIGHT)),
        default=[1, 4, 16],
        metavar="N,N",
        help="requests in flight (default: 1,4,16)",
    )
    load.add_argument(
        "--request-rate", type=list_of(positive), metavar="R,R", help="requests/s at random (Poisson) times instead"
    )
    parser.add_argument(
        "--requests",
        type=whole_to(MOST_REQUESTS),
        metavar="N",
        help="for each load (default: 4 x concurrency, at least 8; rate: 32)",
    )
    parser.add_argument(
        "--warm-up",
        type=whole_to(MOST_REQUESTS, least=0),
        default=1,
        metavar="N",
        help="uncounted requests before each load (default: 1)",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-tokens",
        type=whole_to(MOST_PROMPT_TOKENS),
        default=128,
        metavar="N",
        help="length of built-in prompts, about (default: 128)",
    )
    prompts.add_argument(
        "--dataset", type=file_path, metavar="FILE", help='JSON Lines (also .gz) with {"prompt": "..."} instead'
    )
    parser.add_argument("--output-tokens", type=count, default=128, metavar="N", help="max_tokens (default: 128)")
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --output-tokens tokens")
    parser.add_argument(
        "--confidence",
        type=list_of(unit_interval),
        default=[None],
        metavar="C,C",
        help="0 to 1, each measured at every load (default: the server's)",
    )
    parser.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="what to call (default: chat)"
    )
    parser.add_argument(
        "--no-groups",
        dest="groups",
        action="store_false",
        help="do not ask for groups: for servers that reject unknown fields",
    )
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="for prompts and arrival times (default: 0)")
    parser.add_argument(
        "--timeout", type=waiting_time, default=300.0, metavar="S", help="longest silence in seconds (default: 300)"
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write all figures, also of each request")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0; 1 when a level had no request that succeeded, 2 for bad files, 130 for Ctrl-C."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    levels = [
        Level(concurrency, rate, confidence)
        for confidence in args.confidence
        for concurrency, rate in (
            [(None, rate) for rate in args.request_rate] if args.request_rate else [(c, None) for c in args.concurrency]
        )
    ]
    try:
        dataset = read_prompts(args.dataset) if args.dataset else None
        if args.json:
            check_output("--json", args.json)  # a path that cannot be written costs no measurement
        check_apart({"--dataset": args.dataset, "--json": args.json})
    except (OSError, ValueError) as error:
        return _fail(err, str(error), 2)
    allow_many_connections()
    measured: list[Measured] = []
    code = 0
    try:
        with httpx.Client(**client_options(args.url, args.api_key, args.timeout)) as client:
            model = args.model or first_model(client)
            words = 1 if dataset else max(1, round(args.prompt_tokens * _words_per_token(client, model)))
        asyncio.run(_measure(args, model, levels, dataset, words, err, measured.append))
    except RequestError as error:
        code = _fail(err, str(error), 1)
    except KeyboardInterrupt:
        code = _fail(err, "stopped", 130)
    if measured:
        _print_tables(out, measured, f"{model} at {args.url}, {args.endpoint}")
        if args.json:
            try:
                write_output("--json", args.json, json.dumps(_report(args, model, measured), indent=1))
            except OSError as error:
                code = _fail(err, str(error), 2)
    if code == 0 and any(not m.summary.ok for m in measured):
        code = _fail(err, "at least one level had no request that succeeded; the reasons stand above", 1)
    return code


async def _measure(
    args: argparse.Namespace,
    model: str,
    levels: list[Level],
    dataset: list[str] | None,
    words: int,
    err: Console,
    on_level: Callable[[Measured], None],
) -> None:
    """Run all levels, one after the other. Raises RequestError when a warm-up request fails."""
    numbers = [level.num_requests(args.requests) for level in levels]
    # Every request of the run has a prompt of its own, or a later level would be answered from the prefix cache.
    prompts = cycle(dataset) if dataset else endless_prompts(words, args.seed)
    progress = Progress(console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal)
    async with httpx.AsyncClient(**client_options(args.url, args.api_key, args.timeout)) as client:
        with progress:
            for number, level in zip(numbers, levels, strict=True):
                job = Job(
                    model=model,
                    endpoint=args.endpoint,
                    output_tokens=args.output_tokens,
                    confidence=level.confidence,
                    ignore_eos=args.ignore_eos,
                    groups=args.groups,
                )
                warm_up = [next(prompts) for _ in range(args.warm_up)]
                for answer in await closed_loop(client, job, warm_up, level.concurrency, _no_progress):
                    if answer.error:
                        rejected = answer.error.startswith("HTTP 400")
                        raise RequestError(
                            f"the warm-up request failed: {answer.error}",
                            "A server that rejects unknown fields needs --no-groups." if rejected else "",
                        )
                chosen = [next(prompts) for _ in range(number)]
                task = progress.add_task(f"{level.load}, confidence {level.confidence_text}", total=number)

                def on_end(task: Any = task) -> None:
                    progress.advance(task)

                if level.request_rate is None:
                    answers = await closed_loop(client, job, chosen, level.concurrency, on_end)
                else:
                    offsets = poisson_offsets(number, level.request_rate, args.seed)
                    answers = await open_loop(client, job, chosen, offsets, on_end)
                on_level(Measured(level, answers, summarise(answers)))


def _words_per_token(client: httpx.Client, model: str) -> float:
    """Words of our built-in prompts per token of the served model, from /tokenize where the server has it."""
    sample = " ".join(FACTS)
    try:
        response = client.post("/tokenize", json={"model": model, "prompt": sample})
        return len(sample.split()) / int(response.json()["count"])
    except httpx.HTTPError as error:
        raise transport_error(error, client.base_url) from error
    except (ValueError, LookupError, TypeError, ArithmeticError):  # no count, 0, or one beyond all numbers
        return WORDS_PER_TOKEN


def _print_tables(out: Console, measured: list[Measured], title: str) -> None:
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
        for reason, times in m.summary.failures.items():
            out.print(f"{m.level.load}: {times} failed: {reason}", style="red", markup=False, soft_wrap=True)
    for source in sorted({m.summary.counted_by for m in measured if m.summary.ok}):
        out.print(f"Tokens are counted by {COUNTED_BY[source]}.", style="dim")


def _report(args: argparse.Namespace, model: str, measured: list[Measured]) -> dict[str, Any]:
    """Everything that was measured, for JSON; times in seconds. Names no key."""
    names = ("endpoint", "requests", "warm_up", "prompt_tokens", "output_tokens", "ignore_eos", "groups", "seed")
    return {
        "url": args.url,
        "model": model,
        "asked": {
            **{name: getattr(args, name) for name in names},
            "dataset": str(args.dataset) if args.dataset else None,
        },
        "percentiles": "linear interpolation between closest ranks",
        "levels": [
            {
                **asdict(m.level),
                **asdict(m.summary),
                "requests": [_request(answer, m.answers[0].started) for answer in m.answers],
            }
            for m in measured
        ],
    }


def _request(answer: Answer, start: float) -> dict[str, Any]:
    """One request's figures; `arrivals` are [seconds after it was sent, tokens]."""
    return {
        "sent": answer.started - start,
        "ttft": answer.ttft,
        "tpot": answer.tpot,
        "e2e": answer.e2e,
        "prompt_tokens": answer.usage.prompt_tokens if answer.usage else None,
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


def _fail(err: Console, message: str, code: int) -> int:
    err.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    return code


def _no_progress() -> None:
    """Warm-up requests show no progress."""
