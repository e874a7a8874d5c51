"""A scripted server for each client test, standard input, and nothing kept in or taken from the real environment."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_server import EvalServer
from scripted_server import ScriptedServer, serve


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.delenv("HAMBURGER_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    with serve(ScriptedServer()) as running:
        yield running


@pytest.fixture
def eval_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EvalServer]:
    monkeypatch.delenv("HAMBURGER_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    running = EvalServer()
    with serve(running):
        yield running


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard input as a pipe; `say` fills it."""
    stdin = io.StringIO()
    monkeypatch.setattr(sys, "stdin", stdin)
    return stdin


@pytest.fixture(autouse=True)
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where these tests' typed lines are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "hamburger" / "chat_history"
