"""benchmarks/http_cost.py: its ratio is of a round, the warm-up is no round, and one round has a range, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import http_cost
from comparison.contestants import Launch, Server, Worker
from comparison.roster import Entry, Roster
from comparison.workload import Request

LAUNCH = Launch([], {}, Path())


class StillTree:
    def pause(self) -> None:
        """Nothing runs."""


class StillServer(Server):
    def start(self) -> None:
        self.tree: Any = StillTree()

    def end(self) -> None:
        """Nothing was started."""


class StillWorker(Worker):
    def start(self) -> None:
        self.tree: Any = StillTree()

    def end(self) -> None:
        """Nothing was started."""


@pytest.mark.parametrize(("rounds", "told"), [(1, "0.800 (0.80 to 0.80)"), (3, "0.800 (0.60 to 0.80)")])
def test_ratios_are_taken_round_by_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rounds: int, told: str
) -> None:
    roster = Roster()
    roster.add("hamburger", StillServer(LAUNCH, ours=True), Entry("hamburger", "hamburger"))
    roster.add("engine", StillWorker(LAUNCH), Entry("engine", "engine"))
    # The machine halves its speed after each round; the first warms up.
    of_server, of_engine = iter([10.0, 80.0, 40.0, 15.0]), iter([100.0, 100.0, 50.0, 25.0])

    def speed(contestant: object, requests: Sequence[Request], streams: int) -> float:
        return next(of_server if isinstance(contestant, Server) else of_engine)

    monkeypatch.setattr(http_cost, "build_roster", lambda setup: roster)
    monkeypatch.setattr(http_cost, "_speed", speed)
    monkeypatch.setattr(sys, "argv", ["http_cost.py", "--streams", "4", "--rounds", str(rounds)])
    http_cost.main()
    assert capsys.readouterr().out == f"4 streams: {told}\n"
