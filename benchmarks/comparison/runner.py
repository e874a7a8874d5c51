"""The order of a run: every contestant in turn, round after round, one at a time, and what to do when one fails.

Writes nothing: whoever runs it is told of each cell.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from comparison.capacity import Capacity
from comparison.contestants import Contestant
from comparison.figures import Cell, figures_of, weight_bytes_per_second
from comparison.processes import ContestantError
from comparison.roster import Entry, Roster
from comparison.workload import Lengths, Request, Writer, draw

MOST_FAILURES = 2  # of one contestant, after which it is left out of the rest
WARM_UP_OUTPUT = 8  # tokens
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """streams: the levels; each is measured in all rounds before the next one. Timeouts in seconds."""

    streams: Sequence[int]
    rounds: int
    requests_per_stream: int
    least_requests: int
    seed: int
    timeout: float

    def num_requests(self, streams: int) -> int:
        return max(self.least_requests, self.requests_per_stream * streams)


@dataclass(slots=True)
class Workload:
    """The same lengths for all rounds of a level, and texts that no round and no contestant has seen before."""

    lengths: Sequence[Lengths]
    writer: Writer
    plan: Plan

    def requests(self, streams: int, round_: int) -> list[Request]:
        """The requests of a round. Round -1 is the warm-up: as many as streams, with short answers."""
        drawn = draw(self.lengths, self.plan.num_requests(streams), self.plan.seed + streams)
        seed = (self.plan.seed + streams) * 1000 + round_ + 1
        if round_ < 0:
            short = [replace(row, output_tokens=min(row.output_tokens, WARM_UP_OUTPUT)) for row in drawn[:streams]]
            return self.writer.requests(short, seed)
        return self.writer.requests(drawn, seed)


@dataclass(slots=True)
class Runner:
    """Starts contestants, keeps all but one still, and measures. `say` gets one line for people at a time.

    capacity: who can be alive at once; None for everybody. left: seconds for the rest of the run. With less than
    `least` and what its start took before (`starts`, by process; for one that was never started, the newest of any)
    nothing of a contestant is begun.
    """

    roster: Roster
    plan: Plan
    workload: Workload
    bandwidth: Callable[[], float | None]  # measured now, in bytes/s
    say: Callable[[str], None]
    bandwidths: list[float]  # what was measured is added here
    capacity: Capacity | None = None
    left: Callable[[], float] = lambda: math.inf
    least: float = 0.0
    starts: dict[str, float] = field(default_factory=dict)
    _running: dict[str, Contestant] = field(default_factory=dict)  # who was used last comes last
    _warm: set[tuple[str, int]] = field(default_factory=set)
    _failures: Counter[str] = field(default_factory=Counter)

    def cells(self, done: Container[tuple[int, int, str]]) -> Iterator[Cell]:
        """Measure and yield all cells whose keys are not in `done`. Ends no process: `close` does."""
        for streams in self.plan.streams:
            for round_ in range(self.plan.rounds):
                # Who begins changes from round to round, so that drift favours nobody.
                entries = [entry for entry in self.roster.entries if streams <= entry.most_streams]
                first = round_ % max(len(entries), 1)
                todo = [e for e in [*entries[first:], *entries[:first]] if (streams, round_, e.name) not in done]
                if todo and (measured := self.bandwidth()) is not None:
                    self.bandwidths.append(measured)
                for entry in todo:
                    if entry in self.roster.entries and self._has_time(entry.process):  # or it was left out meanwhile
                        yield self._cell(entry, streams, round_)

    def start(self) -> None:
        """Start everybody before anything is measured, each alone, so that all are there from the first round on."""
        for name in list(self.roster.processes):
            try:
                self._ready(name)
            except ContestantError as error:
                self._leave_out(name, str(error))

    def use(self, roster: Roster, plan: Plan, workload: Workload) -> None:
        """Go on with other measurements; processes stay as they are."""
        self.roster, self.plan, self.workload = roster, plan, workload
        self._warm.clear()

    def make_room(self, needed: int) -> None:
        """End whom there is no room for beside a process that needs so many bytes: first who is not measured now, then
        whose turn was longest ago."""
        if self.capacity is not None:
            by_use = sorted(self._running, key=lambda name: name in self.roster.processes)
            for name in self.capacity.too_many(by_use, needed):
                self.say(f"ending {name}: no room for it beside the next")
                self._end(name)

    def close(self) -> None:
        """End all processes, at once. Safe to call again."""
        if self._running:
            with ThreadPoolExecutor(len(self._running)) as threads:
                list(threads.map(lambda contestant: contestant.end(), self._running.values()))
        self._running.clear()
        self._warm.clear()

    def _has_time(self, process: str) -> bool:
        start = self.starts.get(process, next(reversed(self.starts.values()), 0.0))
        if self.left() >= self.least + (0 if process in self._running else start):
            return True
        self.say(f"no time left for {process}")
        return False

    def _cell(self, entry: Entry, streams: int, round_: int) -> Cell:
        try:
            contestant = self._ready(entry.process)
            contestant.tree.resume()
            try:
                cell = self._measure(contestant, entry, streams, round_)
            finally:
                contestant.tree.pause()
        except ContestantError as error:
            if entry.process in self._running:
                self._end(entry.process)
            self._failures[entry.process] += 1
            self.say(f"{entry.name} failed at {streams} streams: {error}")
            if self._failures[entry.process] >= MOST_FAILURES:
                self._leave_out(entry.process, f"it failed {MOST_FAILURES} times, at last: {error}")
            return Cell(streams, round_, entry.name, None, str(error))
        return cell

    def _measure(self, contestant: Contestant, entry: Entry, streams: int, round_: int) -> Cell:
        if (entry.name, streams) not in self._warm:
            warm_up = self._requests(entry, streams, -1)
            contestant.answer(warm_up, streams, entry.confidence, self.plan.timeout)
            self._warm.add((entry.name, streams))
        requests = self._requests(entry, streams, round_)
        with contestant.tree.watch_memory() as peak:
            answers = contestant.answer(requests, streams, entry.confidence, self.plan.timeout)
        asked = sum(request.output_tokens for request in requests)
        if (given := sum(answer.completion_tokens for answer in answers)) > asked:
            raise ContestantError(f"it gave {given} tokens where {asked} were asked for")
        try:
            figures = figures_of(answers, [len(request.prompt_ids) for request in requests], peak[0] / MEBIBYTE)
        except ValueError as wrong:
            raise ContestantError(str(wrong)) from wrong
        if entry.weights is not None:
            figures = replace(figures, weight_bytes_per_second=weight_bytes_per_second(answers, entry.weights))
        error = None if given == asked else f"it gave {given} of {asked} tokens"
        self.say(f"{streams:3d} streams, round {round_ + 1}, {entry.name}: {figures.tokens_per_second:.1f} tokens/s")
        return Cell(streams, round_, entry.name, figures, error)

    def _requests(self, entry: Entry, streams: int, round_: int) -> list[Request]:
        requests = self.workload.requests(streams, round_)
        return requests if entry.group is None else [replace(request, group=entry.group) for request in requests]

    def _ready(self, name: str) -> Contestant:
        """A contestant that was started; it stands still."""
        contestant = self._running.pop(name, None)
        if contestant is not None:
            self._running[name] = contestant  # the last now
            return contestant
        if self.capacity is not None:
            self.make_room(self.capacity.needs.get(name, 0))
        try:
            return self._started(name)
        except ContestantError as failure:
            crowded = any(word in str(failure).lower() for word in ("memory", "busy"))  # in CUDA's words
            if self.capacity is None or not self._running or not crowded:
                raise
            self.say(f"{name} is tried once more, alone: {failure}")
        self.close()
        return self._started(name)

    def _started(self, name: str) -> Contestant:
        contestant, alone, began = self.roster.processes[name], not self._running, time.monotonic()
        self.say(f"starting {name}")
        self._running[name] = contestant
        try:
            contestant.start()
        except ContestantError:
            self._end(name)
            raise
        contestant.tree.pause()
        self.starts.pop(name, None)
        self.starts[name] = time.monotonic() - began  # the last now: the first of a machine may compile for all
        if self.capacity is not None and alone:
            self.capacity.learn(contestant.facts)
        return contestant

    def _end(self, name: str) -> None:
        self._running.pop(name).end()
        gone = {entry.name for entry in self.roster.entries if entry.process == name}
        self._warm = {key for key in self._warm if key[0] not in gone}

    def _leave_out(self, process: str, why: str) -> None:
        if process in self._running:
            self._end(process)
        for entry in [entry for entry in self.roster.entries if entry.process == process]:
            self.roster.entries.remove(entry)
            self.roster.left_out[entry.name] = why
            self.say(f"{entry.name} is left out: {why}")
