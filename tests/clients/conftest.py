"""A scripted server for each client test, and no key from the environment."""

from __future__ import annotations

from collections.abc import Iterator

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
