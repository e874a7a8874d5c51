"""`hamburger eval-tasks`: scores of a server on IFEval, GSM8K, ARC-Easy and PIQA, alone or beside a second server.

Arguments, the order of work and output; items are read and scored by items.py, asked by requests.py, kept by
answers.py. Speaks HTTP only; must not import hamburger.server, engine or model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from hamburger.clients.arguments import (
    DEFAULT_URL,
    add_patience_arguments,
    count,
    file_path,
    sendable_key,
    server_url,
    unit_interval,
    utf8_text,
    whole,
    whole_to,
)
from hamburger.clients.connection import API_KEY_VARIABLE, Clients, client_options, first_model
from hamburger.clients.ends import end_of_resumable
from hamburger.clients.evaluation.answers import AnswerStore, Usage
from hamburger.clients.evaluation.bootstrap import LEVEL, SAMPLES
from hamburger.clients.evaluation.errors import EvalError
from hamburger.clients.evaluation.ifeval_text import TextTools
from hamburger.clients.evaluation.items import TASKS, Item, Task, read_items, score
from hamburger.clients.evaluation.report import Figures, Side, compare, print_tables, read_report, task_report
from hamburger.clients.evaluation.requests import Server, ask_all
from hamburger.clients.load import allow_many_connections
from hamburger.clients.output_files import check_apart, check_output, write_output

MOST_RESAMPLES = 1_000_000
_SECOND = ("base_url_b", "model_b", "confidence_b", "api_key_b")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a run does. earlier: the second side from a file, where --compare names one."""

    items: dict[str, list[Item]]
    tools: TextTools | None
    earlier: tuple[str, dict[str, Side]] | None
    answers: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger eval-tasks`."""
    parser.add_argument(
        "--base-url",
        "--url",
        type=server_url,
        default=DEFAULT_URL,
        metavar="URL",
        help="server A (default: %(default)s)",
    )
    parser.add_argument(
        "--model", type=utf8_text, help="a served model's name (default: the first that the server lists)"
    )
    parser.add_argument("--confidence", type=unit_interval, metavar="C", help="0 to 1 (default: the server's)")
    parser.add_argument(
        "--api-key", type=sendable_key, metavar="KEY", help=f"default: the environment variable {API_KEY_VARIABLE}"
    )
    second = parser.add_argument_group(
        "a second side, B", "Any of these adds it; what is not given is as for A. Differences are A - B, item by item."
    )
    second.add_argument("--base-url-b", type=server_url, metavar="URL", help="another server")
    second.add_argument("--model-b", type=utf8_text, metavar="MODEL", help="another model")
    second.add_argument("--confidence-b", type=unit_interval, metavar="C", help="another confidence")
    second.add_argument("--api-key-b", type=sendable_key, metavar="KEY", help="the other server's key")
    second.add_argument(
        "--compare", type=file_path, metavar="FILE", help="the first server of an earlier run's --out instead"
    )
    parser.add_argument(
        "--tasks", type=_tasks, default=list(TASKS), metavar="T,T", help=f"of {','.join(TASKS)} (default: all)"
    )
    parser.add_argument(
        "--data", type=file_path, required=True, metavar="FOLDER", help="with the tasks' .jsonl.gz files"
    )
    parser.add_argument("--limit", type=count, metavar="N", help="the first N items of each task (default: all)")
    parser.add_argument(
        "--max-tokens",
        type=count,
        metavar="N",
        help="of a written answer (default: "
        + ", ".join(f"{task.max_tokens} for {task.name}" for task in TASKS.values() if task.max_tokens)
        + ")",
    )
    add_patience_arguments(parser, concurrency=16)
    parser.add_argument("--out", type=file_path, required=True, metavar="FILE", help="where the results go, JSON")
    parser.add_argument(
        "--answers",
        type=file_path,
        metavar="FILE",
        help="where answers are kept and found again (default: beside --out)",
    )
    parser.add_argument(
        "--resamples",
        type=whole_to(MOST_RESAMPLES),
        default=SAMPLES,
        metavar="N",
        help="of the bootstrap (default: %(default)s)",
    )
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of the bootstrap (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Ask, score, print, write. Returns 0; 1 when a request failed, 2 for options or files, 130 for Ctrl-C."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    allow_many_connections()

    def work() -> int:
        plan = _plan(args)
        with AnswerStore(plan.answers) as store:
            _evaluate(args, plan, store, out, err)
        return 0

    return end_of_resumable(work, err)


def _plan(args: argparse.Namespace) -> _Plan:
    """What the run does; finds whatever can be wrong without a server. Raises EvalError or OSError."""
    if args.compare and any(getattr(args, name) is not None for name in _SECOND):
        raise EvalError("--compare and a second server (--base-url-b, --model-b, ...) are both given: choose one.")
    if not args.data.is_dir():
        raise EvalError(f"--data {args.data} is no folder: name the one with the tasks' .jsonl.gz files.")
    check_output("--out", args.out)  # a path that cannot be written costs no evaluation
    answers = args.answers or args.out.with_suffix(".answers.jsonl")
    check_output("--answers", answers)
    tasks = [TASKS[name] for name in args.tasks]
    earlier = read_report(args.compare, {task.name: task.metrics for task in tasks}) if args.compare else None
    try:
        check_apart({"--out": args.out, "--answers": answers, "--compare": args.compare})
    except ValueError as error:
        raise EvalError(str(error)) from None
    items = {task.name: read_items(args.data, task, args.limit) for task in tasks}
    tools = TextTools() if "ifeval" in items else None
    return _Plan(items, tools, earlier, answers)


def _evaluate(args: argparse.Namespace, plan: _Plan, store: AnswerStore, out: Console, err: Console) -> None:
    """All tasks, one after the other, A before B; then writes --out and prints the tables."""
    keys = {"A": args.api_key}
    servers = {"A": _server(args.base_url, args.model, args.confidence, args.api_key, args.timeout)}
    if any(getattr(args, name) is not None for name in _SECOND):
        same_server = args.base_url_b in (None, args.base_url)
        keys["B"] = args.api_key_b or args.api_key
        servers["B"] = _server(
            args.base_url_b or args.base_url,
            args.model_b or (servers["A"].model if same_server else None),
            args.confidence if args.confidence_b is None else args.confidence_b,
            keys["B"],
            args.timeout,
        )
        if servers["A"] == servers["B"]:
            raise EvalError("A and B are the same: change --base-url-b, --model-b or --confidence-b.")
    labels = [server.label for server in servers.values()] + ([plan.earlier[0]] if plan.earlier else [])
    figures: list[Figures] = []
    usages: list[tuple[str, str, Usage]] = []
    reports: dict[str, Any] = {}
    with Progress(console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal) as progress:
        for name in plan.items:
            task = TASKS[name]
            sides = {
                side: asyncio.run(_side(args, server, keys[side], task, plan, store, progress))
                for side, server in servers.items()
            }
            if plan.earlier:
                sides["B"] = plan.earlier[1][name]
            a, b = sides["A"], sides.get("B")
            found = compare(name, task.metrics, a, b, samples=args.resamples, seed=args.seed)
            figures += found
            usages += [(name, side, done.usage) for side, done in sides.items() if done.usage is not None]
            reports[name] = task_report(found, a, b)
    asked = ("limit", "max_tokens", "concurrency", "resamples", "seed")
    report = {
        "servers": {name: {"label": label} for name, label in zip("ab", labels, strict=False)},
        "asked": {"data": str(args.data), **{name: getattr(args, name) for name in asked}},
        "level": LEVEL,
        "answers": str(plan.answers),
        "tasks": reports,
    }
    write_output("--out", args.out, json.dumps(report, indent=1))  # before the tables, which a closed pipe may not take
    print_tables(out, labels, figures, usages)


async def _side(
    args: argparse.Namespace,
    server: Server,
    api_key: str | None,
    task: Task,
    plan: _Plan,
    store: AnswerStore,
    progress: Progress,
) -> Side:
    """One server's answers to one task, scored; says how many were asked before. Raises RequestError."""
    items, began = plan.items[task.name], time.time()
    bar = progress.add_task(f"{task.name}: {server.label}", total=len(items))
    max_tokens = args.max_tokens or task.max_tokens or 0
    async with Clients(client_options(server.url, api_key, args.timeout)) as clients:
        answers = await ask_all(
            clients, server, task, items, max_tokens, store, args.concurrency, lambda: progress.advance(bar)
        )
    progress.remove_task(bar)
    if stored := sum(answer.sent < began for answer in answers):
        said = f"{task.name}: {stored} of {len(answers)} answers of {server.label} were in {plan.answers} already."
        progress.console.print(said, style="dim", markup=False, soft_wrap=True)
    pairs = zip(items, answers, strict=True)
    scores = {item.id: score(task, item, answer.content, plan.tools) for item, answer in pairs}
    return Side(scores, Usage.of(answers) if task.max_tokens else None)


def _server(url: str, model: str | None, confidence: float | None, api_key: str | None, timeout: float) -> Server:
    """Raises RequestError when the model's name cannot be had."""
    if model is None:
        with httpx.Client(**client_options(url, api_key, timeout)) as client:
            model = first_model(client)
    return Server(url, model, confidence)


def _tasks(text: str) -> list[str]:
    """The argparse type of --tasks."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"{name!r} is no task: choose of {', '.join(TASKS)}")
    return names
