"""compare.py's processes: how they answer, fail, stand still and end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from comparison.contestants import Launch, NotInstalled, Server, Worker
from comparison.processes import ContestantError, ProcessTree
from comparison.workload import Request
from processes import is_alive
from scripted_server import Reply, ScriptedServer, hamburger_stream, serve

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# A worker whose options say what it does when asked.
WORKER = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from peers.wire import Timing, serve

def load(options):
    if options["does"] == "lack":
        raise ImportError("No module named 'peer'")
    def measure(asks, streams):
        print("libraries print what they like")
        if options["does"] == "die":
            os._exit(7)
        if options["does"] == "raise":
            raise ValueError("a broken kernel")
        if options["does"] == "hang":
            time.sleep(600)
        timings = []
        for ask in asks:
            timing = Timing(len(ask.prompt_ids))
            for _ in range(ask.output_tokens):
                timing.add(1, time.perf_counter())
            timings.append(timing)
        return timings
    return measure, {"version": "1"}

serve(load)
"""


def worker(tmp_path: Path, does: str) -> Worker:
    command = [sys.executable, "-c", WORKER, f'{{"does": "{does}"}}', str(BENCHMARKS)]
    return Worker(Launch(command, {}, tmp_path / "worker.log", start_seconds=60))


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = worker(tmp_path, getattr(request, "param", "answer"))
    made.start()
    yield made
    made.end()


REQUESTS = [Request([1, 2, 3], 4), Request([1], 2)]


def test_a_worker_answers_in_order(started: Worker) -> None:
    answers = started.answer(REQUESTS, 2, None, 60)
    assert started.facts == {"version": "1"}
    assert [a.completion_tokens for a in answers] == [4, 2]
    assert [a.usage and a.usage.prompt_tokens for a in answers] == [3, 1]
    assert all(a.first and a.ended and a.started <= a.first <= a.ended for a in answers)


@pytest.mark.parametrize(
    ("started", "message"),
    [
        ("die", r"ended with exit code 7; .*worker.log says more"),
        ("raise", "ValueError: a broken kernel"),
        ("hang", "did not answer within 0.2 s"),
    ],
    indirect=["started"],
)
def test_a_worker_that_fails_says_how(started: Worker, message: str) -> None:
    with pytest.raises(ContestantError, match=message):
        started.answer(REQUESTS, 2, None, 0.2 if "within" in message else 60)


def test_a_worker_without_its_package_is_not_installed(tmp_path: Path) -> None:
    lacking = worker(tmp_path, "lack")
    with pytest.raises(NotInstalled, match="No module named 'peer'"):
        lacking.start()
    lacking.end()


def states(pids: Sequence[int]) -> set[str]:
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_tree_stands_still_and_ends_with_children_in_other_sessions(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        "print(p.pid, flush=True); p.wait()"
    )
    tree = ProcessTree([sys.executable, "-c", code], {}, tmp_path / "log")
    child = int(tree.stdout.readline())
    try:
        members = tree.members()
        assert len(members) == 2
        assert members[1] == child
        assert tree.resident_bytes() > 1 << 20
        tree.pause()
        wait_for(lambda: states(members) == {"T"})
        tree.resume()
        wait_for(lambda: "T" not in states(members))
        tree.pause()
    finally:
        tree.end()
    wait_for(lambda: not any(is_alive(pid) for pid in members))
    tree.end()  # again harms nobody


def test_a_server_is_asked_by_token_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HAMBURGER_API_KEY", raising=False)
    with serve(ScriptedServer()) as scripted:
        scripted.replies = [Reply(hamburger_stream([("a", 2), ("b", 2)], chat=False))]
        for ours in (True, False):
            server = Server(
                Launch(["true"], {}, tmp_path / "log"), ours=ours, end_tokens=[2], url=scripted.url, model="m"
            )
            answers = server.answer([Request([5, 6], 4)] * 3, 2, 0.5 if ours else None, 60)
            assert [a.completion_tokens for a in answers] == [4, 4, 4]
            body = scripted.requests[-1]
            assert body["prompt"] == [5, 6]
            assert body["max_tokens"] == 4
            assert ("confidence" in body, "ignore_eos" in body) == (ours, ours)
            assert body.get("logit_bias") == (None if ours else {"2": -100})
