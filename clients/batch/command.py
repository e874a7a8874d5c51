"""`hamburger run-batch`: asks a server all requests of a file, and keeps the answers as they come.

Arguments, the order of work and output; the lines of its files are in lines.py. Speaks HTTP only; must not import
hamburger.server, engine or model.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from hamburger.clients.arguments import add_patience_arguments, add_server_arguments, file_path, whole
from hamburger.clients.batch.lines import (
    BatchAnswer,
    BatchRequest,
    answer_row,
    count_missing,
    lost_row,
    parse_answer,
    read_requests,
)
from hamburger.clients.connection import FULL, Clients, check_answer, client_options, first_model, patient_post
from hamburger.clients.ends import end_of_resumable, terminated_as_by_ctrl_c
from hamburger.clients.json_lines import GrowingFile
from hamburger.clients.load import allow_many_connections
from hamburger.clients.output_files import check_apart, check_output
from hamburger.clients.wire import LostAnswer, RequestError, error_message, token_count

_MOST_REASONS = 10
_MOST_LOST = 3  # requests given up one after the other: it is the server, then
# What ends the run, as all requests would have it: keys that are refused, and a server that stays full.
_OF_ALL = (401, 403, *FULL)


@dataclass
class _Run:
    """What has come of the requests so far. reasons: of those that failed. lost_in_a_row: requests that were given up
    since the last answer. has_answered: the server, anything."""

    answered: int = 0
    tokens: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    fault: RequestError | None = None
    lost_in_a_row: int = 0
    has_answered: bool = False

    @property
    def failed(self) -> int:
        return self.reasons.total()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger run-batch`."""
    parser.add_argument(
        "-i",
        "--input-file",
        type=file_path,
        required=True,
        metavar="FILE",
        help="requests in OpenAI's batch format, .jsonl or .jsonl.gz",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        type=file_path,
        required=True,
        metavar="FILE",
        help="where the answers go; those that it has are not asked again",
    )
    parser.add_argument(
        "--errors-file",
        type=file_path,
        metavar="FILE",
        help="where refused requests go (default: beside --output-file, .errors.jsonl)",
    )
    add_server_arguments(parser, "what each request says, or else the first that the server lists")
    add_patience_arguments(parser, concurrency=64)
    parser.add_argument(
        "--priority",
        type=whole,
        metavar="N",
        help="of requests that name none; above 0 all others go first (default: none is sent)",
    )


def run(args: argparse.Namespace) -> int:
    """Ask, keep, count. Returns 0; 1 when a request failed, 2 for options or files, 130 for Ctrl-C or SIGTERM."""
    err = Console(stderr=True, highlight=False)
    allow_many_connections()
    return end_of_resumable(lambda: 1 if _run(args, err).failed else 0, err)


def _run(args: argparse.Namespace, err: Console) -> _Run:
    """Raises ValueError or OSError for what is wrong with options or files, RequestError where the run cannot go on."""
    fields = {} if args.model is None else {"model": args.model}
    defaults: dict[str, Any] = {}
    if args.priority is not None:
        defaults["priority"] = args.priority
    if args.input_file.is_fifo():
        raise ValueError(f"--input-file {args.input_file} is a pipe, but it is read twice: write it to a file first.")
    check_output("--output-file", args.output_file)
    beside = args.output_file.name.removesuffix(".jsonl") + ".errors.jsonl"
    errors = args.errors_file or args.output_file.with_name(beside)
    check_output("--errors-file", errors)
    check_apart({"--input-file": args.input_file, "--output-file": args.output_file, "--errors-file": errors})
    models = [request.model for request in read_requests(args.input_file, fields, defaults)]  # all lines are sound
    if None in models:
        with httpx.Client(**client_options(args.url, args.api_key, args.timeout)) as client:
            defaults["model"] = first_model(client)
    with ExitStack() as stack:
        answers = stack.enter_context(_growing("--output-file", args.output_file))
        failures = stack.enter_context(_growing("--errors-file", errors))
        number = count_missing(read_requests(args.input_file, fields, defaults), answers.rows, args.output_file)
        answered = {answer.custom_id for answer in answers.rows}
        # Read once more as they are sent: all bodies together may be more than memory holds.
        requests = read_requests(args.input_file, fields, defaults)
        missing = (request for request in requests if request.custom_id not in answered)
        failures.clear()  # those that failed are asked again
        progress = Progress(console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal)
        bar = stack.enter_context(progress).add_task("requests", total=len(models), completed=len(answers.rows))
        began = time.perf_counter()
        done = _Run(has_answered=None in models)
        asyncio.run(_ask_all(args, done, missing, number, answers, failures, lambda: progress.advance(bar)))
        done.seconds = time.perf_counter() - began
    _tell(args, errors, done, len(answers.rows))
    if done.fault is not None:
        raise done.fault
    return done


def _growing(option: str, path: Path) -> GrowingFile[BatchAnswer]:
    return GrowingFile(option, path, partial(parse_answer, option, path))


async def _ask_all(
    args: argparse.Namespace,
    done: _Run,
    waiting: Iterator[BatchRequest],
    number: int,
    answers: GrowingFile[BatchAnswer],
    failures: GrowingFile[BatchAnswer],
    on_end: Callable[[], object],
) -> None:
    """Ask the `number` of them, `--concurrency` at once. After a fault nothing new is sent; what is in flight is still
    kept."""

    async def worker() -> None:
        async with clients.one() as client:
            for request in waiting:
                if done.fault is not None:
                    return
                try:
                    status, request_id, body = await _ask(client, request, lambda: done.has_answered)
                except LostAnswer as error:
                    done.lost_in_a_row += 1
                    if done.lost_in_a_row >= _MOST_LOST:
                        done.fault = RequestError(f"{request.custom_id}: {error}")
                        return
                    failures.add(lost_row(request, error.reason))
                    done.reasons[error.reason] += 1
                    on_end()
                    continue
                except RequestError as error:
                    done.fault = RequestError(f"{request.custom_id}: {error}", status=error.status)
                    return
                done.lost_in_a_row, done.has_answered = 0, True
                row = answer_row(request, status, request_id, body)
                if status >= 400 or body.get("error"):  # gateways tell of errors with a 200, too
                    failures.add(row)
                    done.reasons[RequestError(f"HTTP {status}: {error_message(body)}").reason] += 1
                else:
                    answers.add(row)
                    done.answered += 1
                    done.tokens += _tokens(body)
                on_end()

    with terminated_as_by_ctrl_c():
        async with Clients(client_options(args.url, args.api_key, args.timeout)) as clients:
            await asyncio.gather(*(worker() for _ in range(min(args.concurrency, number))))


async def _ask(
    client: httpx.AsyncClient, request: BatchRequest, has_answered: Callable[[], bool]
) -> tuple[int, str, dict[str, Any]]:
    """Status, the server's id of the request, and what it answered. Raises LostAnswer, or another RequestError for
    what ends the run."""
    response = await patient_post(client, request.url, request.body, has_answered)
    if response.status_code in _OF_ALL or response.has_redirect_location:
        check_answer(response)
    try:
        body = response.json()
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        if not response.is_error:
            raise RequestError(
                f"{request.url} did not answer with a JSON object", "Is --url an OpenAI-compatible server?"
            )
        body = {"error": {"message": response.text or response.reason_phrase}}
    return response.status_code, response.headers.get("x-request-id", ""), body


def _tokens(body: dict[str, Any]) -> int:
    """Of the answer, as its usage counts them; 0 where it does not."""
    usage = body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    try:
        return token_count(counts.get("completion_tokens", counts.get("output_tokens"))) or 0
    except TypeError:
        return 0


def _tell(args: argparse.Namespace, errors: Path, done: _Run, had: int) -> None:
    out = Console(highlight=False)

    def say(line: str) -> None:
        out.print(line, markup=False, soft_wrap=True)

    before = f", {had} of them from before" if had else ""
    say(f"{had + done.answered} answers in {args.output_file}{before}.")
    if done.tokens:
        say(f"{done.tokens} tokens in {done.seconds:.1f} s, {done.tokens / done.seconds:.0f} tokens/s.")
    if done.failed:
        say(f"{done.failed} requests failed, in {errors}; the same command asks them again:")
    for reason, number in done.reasons.most_common(_MOST_REASONS):
        say(f"  {number} x {reason}")
