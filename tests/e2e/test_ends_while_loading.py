"""A real server that is ended, or whose engine is, before it serves: it says so and is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes import is_alive

HAMBURGER = str(Path(sys.executable).parent / "hamburger")
LISTENING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


@contextmanager
def loading(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A server that has said one of these words, or that its engine is being built."""
    # Where the tests run in a shell's background, what they start would ignore SIGINT.
    command = [sys.executable, "-c", LISTENING, HAMBURGER, "serve", "--port", "0", "--max-model-len", "512"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if any(word in line for word in words or ("reading", "loading", "building")):
                    break
            yield server
        finally:
            server.kill()


def engine_of(server: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text(encoding="ascii").split()
    [engine] = [int(pid) for pid in children if "hamburger.engine.worker" in Path(f"/proc/{pid}/cmdline").read_text()]
    return engine


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_it_loads_stops_it(number: signal.Signals, code: int) -> None:
    with loading() as server:
        engine = engine_of(server)
        os.kill(engine, signal.SIGSTOP)  # however slow this test is, it has not loaded before
        server.send_signal(number)
        rest, _ = server.communicate(timeout=20)
    assert server.returncode == code
    assert "stopped while loading" in rest
    assert "Traceback" not in rest
    deadline = time.monotonic() + 10
    while is_alive(engine):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_sigterm_before_there_is_an_event_loop_is_no_fault_either() -> None:
    with loading("finding") as server:
        server.send_signal(signal.SIGTERM)
        rest, _ = server.communicate(timeout=20)
    assert server.returncode == 0
    assert "stopped" in rest
    assert "Traceback" not in rest


def test_an_engine_that_is_killed_while_it_loads_is_told_as_one() -> None:
    with loading() as server:
        os.kill(engine_of(server), signal.SIGKILL)
        rest, _ = server.communicate(timeout=20)
    assert server.returncode == 1
    assert "hamburger: the engine died while it was loading: its process" in rest
    assert "Traceback" not in rest
