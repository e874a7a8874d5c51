"""compare.py's order: who is measured when, who stands still, who fails, and how a run is resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import compare
from comparison.figures import Cell
from comparison.limits import WeightBytes
from comparison.processes import ContestantError
from comparison.roster import Entry, Roster
from comparison.runner import Plan, Runner, Workload
from comparison.workload import Lengths, PromptWriter, Request
from fakes import ByteTokenizer
from hamburger.clients.figures import Answer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class StillTree:
    """Notes who was let go and who was stopped; asserts that nobody else is going."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def pause(self) -> None:
        self.log.append(f"{self.name} stands")

    def resume(self) -> None:
        self.log.append(f"{self.name} goes")

    def watch_memory(self) -> Any:
        from contextlib import nullcontext

        return nullcontext([1 << 30])


@dataclass
class FakeContestant:
    """Answers at a fixed speed, or fails from its n-th measurement on."""

    name: str
    log: list[str]
    fails_from: int = 10**9
    starts: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[int, int, float | None]] = field(default_factory=list)

    def start(self) -> None:
        self.log.append(f"{self.name} starts")
        if not self.starts:
            raise ContestantError("it has no model")
        self.tree: Any = StillTree(self.log, self.name)

    def answer(
        self, requests: Sequence[Request], streams: int, confidence: float | None, timeout: float
    ) -> list[Answer]:
        self.asked.append((streams, len(requests), confidence))
        if len(self.asked) > self.fails_from:
            raise ContestantError("it died")
        return [self._answer(i, request) for i, request in enumerate(requests)]

    def _answer(self, index: int, request: Request) -> Answer:
        made = Answer(float(index))
        made.arrivals = [(index + 1 + 0.1 * token, 1) for token in range(request.output_tokens)]
        made.first, made.last = made.arrivals[0][0], made.arrivals[-1][0]
        made.ended = made.last
        return made

    def end(self) -> None:
        self.log.append(f"{self.name} ends")


def runner(*contestants: FakeContestant, said: list[str] | None = None) -> Runner:
    roster = Roster()
    for c in contestants:
        roster.add(c.name, c, Entry(c.name, c.name, None, WeightBytes(10**6)))
    plan = Plan(streams=[1, 2], rounds=2, requests_per_stream=1, least_requests=2, seed=0, timeout=1)
    workload = Workload([Lengths("a", 60, 6), Lengths("a", 90, 20)], PromptWriter(ByteTokenizer()), plan)
    return Runner(roster, plan, workload, lambda: 1e8, (said if said is not None else []).append, [])


def test_contestants_take_turns_and_stand_still_meanwhile() -> None:
    log: list[str] = []
    a, b = FakeContestant("a", log), FakeContestant("b", log)
    made = runner(a, b)
    made.start()
    found = list(made.cells(set()))
    made.close()
    assert [cell.key for cell in found] == [
        *[(1, 0, "a"), (1, 0, "b"), (1, 1, "b"), (1, 1, "a")],
        *[(2, 0, "a"), (2, 0, "b"), (2, 1, "b"), (2, 1, "a")],
    ]
    turns = ["a goes", "a stands", "b goes", "b stands", "b goes", "b stands", "a goes", "a stands"]
    assert log[:-2] == ["a starts", "a stands", "b starts", "b stands", *turns, *turns]
    assert sorted(log[-2:]) == ["a ends", "b ends"]  # at once
    # At each level a warm-up of as many requests as streams comes first.
    assert [asked[:2] for asked in a.asked] == [(1, 1), (1, 2), (1, 2), (2, 2), (2, 2), (2, 2)]
    figures = found[0].figures
    assert figures is not None
    assert figures.peak_memory_mib == 1024
    assert figures.weight_bytes_per_second == pytest.approx(1e6 / 0.1)


def test_one_that_takes_one_answer_at_a_time_is_not_asked_for_more() -> None:
    log: list[str] = []
    made = runner(FakeContestant("a", log))
    one = FakeContestant("one", log)
    made.roster.add("one", one, Entry("one", "one", most_streams=1))
    made.start()
    found = list(made.cells(set()))
    made.close()
    assert [cell.key for cell in found] == [
        *[(1, 0, "a"), (1, 0, "one"), (1, 1, "one"), (1, 1, "a")],
        *[(2, 0, "a"), (2, 1, "a")],
    ]
    assert {streams for streams, _, _ in one.asked} == {1}
    assert made.roster.left_out == {}


def test_one_that_fails_twice_is_left_out_and_the_others_go_on() -> None:
    log: list[str] = []
    said: list[str] = []
    a, b = FakeContestant("a", log), FakeContestant("b", log, fails_from=2)
    made = runner(a, b, said=said)
    made.start()
    found = list(made.cells(set()))
    made.close()
    assert [(cell.key, cell.error) for cell in found if cell.name == "b"] == [
        ((1, 0, "b"), None),
        ((1, 1, "b"), "it died"),
        ((2, 0, "b"), "it died"),
    ]
    assert sum(cell.figures is not None for cell in found if cell.name == "a") == 4
    assert log.count("b starts") == log.count("b ends") == 2  # it was started again after the first
    assert made.roster.left_out == {"b": "it failed 2 times, at last: it died"}
    assert "b is left out: it failed 2 times, at last: it died" in said


def test_one_that_does_not_start_is_left_out() -> None:
    log: list[str] = []
    made = runner(FakeContestant("a", log), FakeContestant("b", log, starts=False))
    made.start()
    assert {cell.name for cell in made.cells(set())} == {"a"}
    assert made.roster.left_out == {"b": "it has no model"}


def test_what_would_start_too_late_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start takes is learned from the starts before it."""
    now = [0.0]
    monkeypatch.setattr("comparison.runner.time.monotonic", lambda: now[0])

    class Slow(FakeContestant):
        def start(self) -> None:
            now[0] += 30
            super().start()

    said: list[str] = []
    a, b = Slow("a", []), Slow("b", [])
    made = runner(a, b, said=said)
    made.left, made.least = lambda: 65 - now[0], 10
    # 35 s are left after a's start: not 30 and 10 more.
    assert [cell.key for cell in made.cells(set())] == [(1, 0, "a"), (1, 1, "a"), (2, 0, "a"), (2, 1, "a")]
    assert made.starts == {"a": 30}
    assert said.count("no time left for b") == 4
    made.left = lambda: 45
    assert [cell.name for cell in made.cells(made_keys("a"))] == ["b"] * 4
    made.starts["b"] = 50  # its own counts, where there is one
    made.close()
    assert list(made.cells(made_keys("a"))) == []


def made_keys(name: str) -> set[tuple[int, int, str]]:
    return {(streams, round_, name) for streams in (1, 2) for round_ in (0, 1)}


def test_what_is_done_is_not_measured_again() -> None:
    log: list[str] = []
    a, b = FakeContestant("a", log), FakeContestant("b", log)
    made = runner(a, b)
    everything = {cell.key for cell in runner(FakeContestant("a", []), FakeContestant("b", [])).cells(set())}
    assert [cell.key for cell in made.cells(everything - {(2, 1, "a")})] == [(2, 1, "a")]
    assert not b.asked


def fake_main(monkeypatch: pytest.MonkeyPatch, contestant: FakeContestant, *arguments: str) -> int:
    def build(setup: object) -> Roster:
        roster = Roster(left_out={"peer": "not installed"})
        roster.add("base", contestant, Entry("base", "base"))
        return roster

    monkeypatch.setattr(compare, "build_roster", build)
    monkeypatch.setattr(compare, "measure_bandwidth", lambda threads: 5e9)
    return compare.main(["--streams", "1", "--rounds", "2", "--context", "128", *arguments])


def test_the_command_resumes_where_it_was_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FakeContestant):
        def answer(self, *args: Any) -> list[Answer]:
            if len(self.asked) == 2:  # a warm-up and one round
                raise KeyboardInterrupt
            return super().answer(*args)

    out = str(tmp_path / "out")
    log: list[str] = []
    assert fake_main(monkeypatch, Interrupted("base", log), "--out", out) == 130
    assert log[-1] == "base ends"
    again = FakeContestant("base", [])
    assert fake_main(monkeypatch, again, "--out", out, "--resume") == 0
    assert len(again.asked) == 2  # its warm-up and the missing round
    table = (tmp_path / "out" / "table.md").read_text()
    assert "medians of 2 rounds" in table
    assert "- peer: not installed" in table
    assert table in capsys.readouterr().out


def test_another_setting_is_not_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert fake_main(monkeypatch, FakeContestant("base", []), "--out", out) == 0
    assert fake_main(monkeypatch, FakeContestant("base", []), "--out", out, "--resume", "--seed", "5") == 2
    assert "was measured with another seed" in capsys.readouterr().err


def test_the_driver_loads_no_torch() -> None:
    """Its threads and memory would stand beside those that it measures."""
    code = "import compare, sys; print([n for n in ('torch', 'transformers', 'llama_cpp') if n in sys.modules])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_cells_survive_json() -> None:
    cell = Cell(1, 0, "a", None, "no")
    assert Cell.from_json(cell.to_json()) == cell
