"""Who is measured: a server over HTTP, or a worker that speaks the lines of peers/wire.py. Both give timed answers."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from comparison.processes import ContestantError, ProcessTree
from comparison.workload import Request
from hamburger.clients.connection import Clients, client_options, first_model
from hamburger.clients.figures import Answer
from hamburger.clients.load import Job, ask
from hamburger.clients.wire import RequestError, Usage
from host.machine import free_port


class NotInstalled(ContestantError):
    """A package that the contestant needs is not there."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a contestant's process. env is added to ours; a server's command holds the text {port}."""

    command: list[str]
    env: Mapping[str, str]
    log: Path
    start_seconds: float = 300.0


class Contestant(Protocol):
    """A process that answers requests. Everything may raise ContestantError, after which only `end` is of use."""

    facts: dict[str, Any]
    tree: ProcessTree

    def start(self) -> None: ...
    def answer(
        self, requests: Sequence[Request], streams: int, confidence: float | None, timeout: float
    ) -> list[Answer]: ...
    def end(self) -> None: ...


@dataclass(slots=True)
class Worker:
    """A process that computes where it is: no HTTP between it and its figures. left: seconds that there are now for
    whatever it does, beside its own limits."""

    launch: Launch
    left: Callable[[], float] = lambda: math.inf
    facts: dict[str, Any] = field(default_factory=dict)
    tree: ProcessTree = field(init=False)
    _lines: queue.Queue[bytes] = field(init=False)

    def start(self) -> None:
        self.tree = ProcessTree(self.launch.command, self.launch.env, self.launch.log)
        self._lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.tree, self._lines), daemon=True).start()
        self.facts = self._next(self.launch.start_seconds)["ready"]

    def answer(
        self, requests: Sequence[Request], streams: int, confidence: float | None, timeout: float
    ) -> list[Answer]:
        asked = [[request.prompt_ids, request.output_tokens, request.group] for request in requests]
        try:
            self.tree.stdin.write(json.dumps({"streams": streams, "requests": asked}).encode() + b"\n")
            self.tree.stdin.flush()
        except BrokenPipeError:
            raise self.tree.died() from None
        return [_answer(timing) for timing in self._next(timeout)["answers"]]

    def end(self) -> None:
        if hasattr(self, "tree"):
            self.tree.end()

    def _next(self, seconds: float) -> dict[str, Any]:
        """The worker's next message. An empty line is the end of its output."""
        seconds = min(seconds, max(1.0, self.left()))
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise ContestantError(f"it did not answer within {seconds:.3g} s") from None
        if not line.endswith(b"\n"):  # it ended, perhaps in the midst of a line
            raise self.tree.died()
        message: dict[str, Any] = json.loads(line)
        if "missing" in message:
            raise NotInstalled(message["missing"])
        if "error" in message:
            raise ContestantError(message["error"])
        return message

    @staticmethod
    def _read(tree: ProcessTree, lines: queue.Queue[bytes]) -> None:
        try:
            for line in tree.stdout:
                lines.put(line)
        except ValueError:  # closed under our hands, at the end
            pass
        lines.put(b"")


def _answer(timing: dict[str, Any]) -> Answer:
    """A worker's timing as the answer that HTTP would have given: each arrival took one slot."""
    arrivals = [(moment, tokens) for moment, tokens in timing["arrivals"]]
    if not arrivals:
        raise ContestantError("it gave an answer without tokens")
    tokens = sum(count for _, count in arrivals)
    return Answer(
        timing["started"],
        first=arrivals[0][0],
        last=arrivals[-1][0],
        arrivals=arrivals,
        usage=Usage(timing["prompt_tokens"], tokens, len(arrivals)),
        ended=timing["ended"],
    )


@dataclass(slots=True)
class Server:
    """An OpenAI-compatible server. ours: it takes our own fields; others get end tokens forbidden by `logit_bias`."""

    launch: Launch
    ours: bool
    end_tokens: Sequence[int] = ()
    health: str = "/health"
    facts: dict[str, Any] = field(default_factory=dict)
    tree: ProcessTree = field(init=False)
    url: str = ""
    model: str = ""

    def start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [part.replace("{port}", str(port)) for part in self.launch.command]
        self.tree = ProcessTree(command, self.launch.env, self.launch.log)
        threading.Thread(target=self.tree.stdout.read, daemon=True).start()  # it may print: nothing must block it
        deadline = time.monotonic() + self.launch.start_seconds
        with httpx.Client(**client_options(self.url, None, 10)) as client:
            while not self._is_healthy(client):
                if self.tree.exit_code is not None:
                    raise self.tree.died()
                if time.monotonic() > deadline:
                    raise ContestantError(f"it was not ready within {self.launch.start_seconds:g} s")
                time.sleep(0.1)
            try:
                self.model = first_model(client)
            except RequestError as error:
                raise ContestantError(str(error)) from None
        self.facts = {"model": self.model}

    def _is_healthy(self, client: httpx.Client) -> bool:
        try:
            return client.get(self.health).is_success
        except httpx.HTTPError:
            return False

    def answer(
        self, requests: Sequence[Request], streams: int, confidence: float | None, timeout: float
    ) -> list[Answer]:
        kind = Job if self.ours else _BiasedJob
        job = kind(model=self.model, endpoint="completions", output_tokens=1, confidence=confidence)
        job = replace(job, ignore_eos=self.ours, groups=self.ours)
        if isinstance(job, _BiasedJob):
            job = replace(job, end_tokens=tuple(self.end_tokens))
        try:
            answers = asyncio.run(self._answer(requests, streams, job, timeout))
        except TimeoutError:
            raise ContestantError(f"it did not answer within {timeout:g} s") from None
        if failed := [answer.error for answer in answers if answer.error is not None]:
            raise ContestantError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
        if not all(answer.arrivals for answer in answers):
            raise ContestantError("it gave an answer without tokens")
        return answers

    async def _answer(self, requests: Sequence[Request], streams: int, job: Job, seconds: float) -> list[Answer]:
        """Keep `streams` requests in flight; the answers come in the requests' order."""
        waiting = iter(enumerate(requests))
        answers: dict[int, Answer] = {}
        async with Clients(client_options(self.url, None, seconds)) as clients, asyncio.timeout(seconds):

            async def seat() -> None:
                async with clients.one() as client:
                    for index, request in waiting:
                        one = replace(job, output_tokens=request.output_tokens)
                        answers[index] = await ask(client, one, request.prompt_ids)

            async with asyncio.TaskGroup() as group:
                for _ in range(min(streams, len(requests))):
                    group.create_task(seat())
        return [answers[index] for index in range(len(requests))]

    def end(self) -> None:
        if hasattr(self, "tree"):
            self.tree.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class _BiasedJob(Job):
    """For servers that cannot ignore end tokens: forbid them."""

    end_tokens: tuple[int, ...] = ()

    def body(self, prompt: str | list[int]) -> dict[str, Any]:
        # dataclass(slots=True) makes a new class, which a bare super() does not know
        return {**Job.body(self, prompt), "logit_bias": {str(token): -100 for token in self.end_tokens}}
