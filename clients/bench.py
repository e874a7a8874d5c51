"""`hamburger bench`: load on any OpenAI-compatible server, and the figures that users feel.

Arguments and levels; load.py sends the requests, figures.py computes, and bench_report.py tells.
Speaks HTTP only; must not import hamburger.server, engine or model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

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
from hamburger.clients.bench_report import Level, Measured, print_tables, report
from hamburger.clients.connection import Clients, client_options, first_model, transport_error
from hamburger.clients.ends import fail, terminated_as_by_ctrl_c
from hamburger.clients.figures import summarise
from hamburger.clients.load import Job, allow_many_connections, closed_loop, open_loop, poisson_offsets
from hamburger.clients.output_files import check_apart, check_output, write_output
from hamburger.clients.prompts import FACTS, endless_prompts, read_prompts
from hamburger.clients.wire import RequestError

# What servers say of a field that they do not know.
_UNKNOWN_FIELD = (
    "return_groups",
    "confidence",
    "ignore_eos",
    "cache_salt",
    "unknown",
    "unrecognized",
    "extra",
    "unexpected",
)
WORDS_PER_TOKEN = 0.75  # of English, where the server has no /tokenize to ask
MOST_REQUESTS, MOST_PROMPT_TOKENS = 100_000, 1_000_000  # more than one client's memory is for


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
    parser.add_argument(
        "--seed",
        type=whole,
        metavar="N",
        help="for prompts and arrival times (default: another each time, which is told)",
    )
    parser.add_argument(
        "--timeout", type=waiting_time, default=300.0, metavar="S", help="longest silence in seconds (default: 300)"
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write all figures, also of each request")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0; 1 when a level had no request that succeeded, 2 for bad files, 130 for Ctrl-C or
    SIGTERM."""
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
        return fail(err, str(error), 2)
    allow_many_connections()
    # Else a second run were answered from the prefix cache of the first.
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    measured: list[Measured] = []
    code = 0
    try:
        with httpx.Client(**client_options(args.url, args.api_key, args.timeout)) as client:
            model = args.model or first_model(client)
            words = 1 if dataset else max(1, round(args.prompt_tokens * _words_per_token(client, model)))
        asyncio.run(_measure(args, model, levels, dataset, words, seed, err, measured.append))
    except RequestError as error:
        code = fail(err, str(error), 1)
    except KeyboardInterrupt:
        code = fail(err, "stopped", 130)
    if measured:
        if args.json:  # before the tables, which a closed pipe may not take
            try:
                write_output("--json", args.json, json.dumps(report(args, model, measured, seed), indent=1))
            except OSError as error:
                code = fail(err, str(error), 2)
        print_tables(out, measured, f"{model} at {args.url}, {args.endpoint}", seed)
    if code == 0 and any(not m.summary.ok for m in measured):
        code = fail(err, "at least one level had no request that succeeded; the reasons stand above", 1)
    return code


async def _measure(
    args: argparse.Namespace,
    model: str,
    levels: list[Level],
    dataset: list[str] | None,
    words: int,
    seed: int,
    err: Console,
    on_level: Callable[[Measured], None],
) -> None:
    """Run all levels, one after the other. Raises RequestError when a warm-up request fails."""
    numbers = [level.num_requests(args.requests) for level in levels]
    for number, level in zip(numbers, levels, strict=True):
        if args.requests and number > args.requests:
            err.print(
                f"{level.load} needs as many requests: {number}, not {args.requests}.", style="dim", soft_wrap=True
            )
    progress = Progress(console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal)
    async with Clients(client_options(args.url, args.api_key, args.timeout)) as clients:
        with progress, terminated_as_by_ctrl_c():
            for index, (number, level) in enumerate(zip(numbers, levels, strict=True)):
                # All levels have the same work, and none is answered from the prefix cache that one before it filled.
                prompts = cycle(dataset) if dataset else endless_prompts(words, seed, index)
                job = Job(
                    model=model,
                    endpoint=args.endpoint,
                    output_tokens=args.output_tokens,
                    confidence=level.confidence,
                    ignore_eos=args.ignore_eos,
                    groups=args.groups,
                    cache_salt=f"bench {seed} {index}" if dataset and args.groups else None,
                )
                warm_up = [next(prompts) for _ in range(args.warm_up)]
                for answer in await closed_loop(clients, job, warm_up, level.concurrency or 1, _no_progress):
                    if answer.error:
                        is_unknown = args.groups and any(word in answer.error.lower() for word in _UNKNOWN_FIELD)
                        remedy = (
                            "A server that rejects unknown fields needs --no-groups." if is_unknown else answer.remedy
                        )
                        raise RequestError(f"the warm-up request failed: {answer.error}", remedy)
                chosen = [next(prompts) for _ in range(number)]
                task = progress.add_task(f"{level.load}, confidence {level.confidence_text}", total=number)

                def on_end(task: Any = task) -> None:
                    progress.advance(task)

                began, computed = time.perf_counter(), time.process_time()
                if level.request_rate is None:
                    answers = await closed_loop(clients, job, chosen, level.concurrency or number, on_end)
                else:
                    offsets = poisson_offsets(number, level.request_rate, seed)
                    answers = await open_loop(clients, job, chosen, offsets, on_end)
                busy = (time.process_time() - computed) / (time.perf_counter() - began)
                on_level(Measured(level, answers, summarise(answers), busy))


def _words_per_token(client: httpx.Client, model: str) -> float:
    """Words of our built-in prompts per token of the served model, from /tokenize where the server has it."""
    sample = " ".join(FACTS)
    try:
        response = client.post("/tokenize", json={"model": model, "prompt": sample})
        return len(sample.split()) / int(response.json()["count"])
    except httpx.HTTPError as error:
        raise transport_error(error, client.base_url) from error
    except (
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ):  # no count, 0, or one beyond all numbers
        return WORDS_PER_TOKEN


def _no_progress() -> None:
    """Warm-up requests show no progress."""
