"""The order of a run: every contestant in turn, round after round, one at a time, and what to do when one fails.

Writes nothing: whoever runs it is told of each cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from compare_contestants import Contestant
from compare_figures import Cell, figures_of, step_seconds
from compare_process import ContestantError
from compare_roster import Entry, Roster
from compare_workload import Lengths, Request, Writer, draw

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
    """Starts contestants, keeps all but one still, and measures. `say` gets one line for people at a time."""

    roster: Roster
    plan: Plan
    workload: Workload
    bandwidth: Callable[[], float | None]  # measured now, in bytes/s
    say: Callable[[str], None]
    bandwidths: list[float]  # what was measured is added here
    _running: set[str] = field(default_factory=set)
    _warm: set[tuple[str, int]] = field(default_factory=set)
    _failures: Counter[str] = field(default_factory=Counter)

    def cells(self, done: Container[tuple[int, int, str]]) -> Iterator[Cell]:
        """Measure and yield all cells whose keys are not in `done`. Ends no process: `close` does."""
        for streams in self.plan.streams:
            for round_ in range(self.plan.rounds):
                # Who begins changes from round to round, so that drift favours nobody.
                entries = self.roster.entries
                first = round_ % max(len(entries), 1)
                todo = [e for e in [*entries[first:], *entries[:first]] if (streams, round_, e.name) not in done]
                if todo and (measured := self.bandwidth()) is not None:
                    self.bandwidths.append(measured)
                for entry in todo:
                    if entry in self.roster.entries:  # else it was left out meanwhile
                        yield self._cell(entry, streams, round_)

    def start(self) -> None:
        """Start everybody before anything is measured, each alone, so that all are there from the first round on."""
        for name in list(self.roster.processes):
            try:
                self._ready(name)
            except ContestantError as error:
                self._leave_out(name, str(error))

    def use(self, roster: Roster, plan: Plan, workload: Workload) -> None:
        """Go on with other measurements. Processes that the new roster lacks are ended, the others stay as they are."""
        for name in sorted(self._running - roster.processes.keys()):
            self._end(name)
        self.roster, self.plan, self.workload = roster, plan, workload
        self._warm.clear()

    def close(self) -> None:
        """End all processes. Safe to call again."""
        for name in sorted(self._running):
            self._end(name)

    def _cell(self, entry: Entry, streams: int, round_: int) -> Cell:
        try:
            contestant = self._ready(entry.process)
            contestant.tree.resume()
            try:
                cell = self._measure(contestant, entry, streams, round_)
            finally:
                contestant.tree.pause()
        except ContestantError as error:
            self._end(entry.process)
            self._failures[entry.process] += 1
            self.say(f"{entry.name} failed at {streams} streams: {error}")
            if self._failures[entry.process] >= MOST_FAILURES:
                self._leave_out(entry.process, f"it failed {MOST_FAILURES} times, at last: {error}")
            return Cell(streams, round_, entry.name, None, str(error))
        return cell

    def _measure(self, contestant: Contestant, entry: Entry, streams: int, round_: int) -> Cell:
        if (entry.name, streams) not in self._warm:
            contestant.answer(self.workload.requests(streams, -1), streams, entry.confidence, self.plan.timeout)
            self._warm.add((entry.name, streams))
        requests = self.workload.requests(streams, round_)
        with contestant.tree.watch_memory() as peak:
            answers = contestant.answer(requests, streams, entry.confidence, self.plan.timeout)
        asked = sum(request.output_tokens for request in requests)
        if (given := sum(answer.completion_tokens for answer in answers)) > asked:
            raise ContestantError(f"it gave {given} tokens where {asked} were asked for")
        figures = figures_of(answers, [len(request.prompt_ids) for request in requests], peak[0] / MEBIBYTE)
        seconds = step_seconds(answers)
        if entry.weights is not None and seconds and self.bandwidths:
            least = entry.weights.of_step(figures.tokens_per_kv) / self.bandwidths[-1]
            figures = replace(figures, limit_fraction=least / seconds)
        error = None if given == asked else f"it gave {given} of {asked} tokens"
        self.say(f"{streams:3d} streams, round {round_ + 1}, {entry.name}: {figures.tokens_per_second:.1f} tokens/s")
        return Cell(streams, round_, entry.name, figures, error)

    def _ready(self, name: str) -> Contestant:
        """A contestant that was started; it stands still."""
        contestant = self.roster.processes[name]
        if name not in self._running:
            self.say(f"starting {name}")
            self._running.add(name)
            try:
                contestant.start()
            except ContestantError:
                self._end(name)
                raise
            contestant.tree.pause()
        return contestant

    def _end(self, name: str) -> None:
        self.roster.processes[name].end()
        self._running.discard(name)
        gone = {entry.name for entry in self.roster.entries if entry.process == name}
        self._warm = {key for key in self._warm if key[0] not in gone}

    def _leave_out(self, process: str, why: str) -> None:
        if process in self._running:
            self._end(process)
        for entry in [entry for entry in self.roster.entries if entry.process == process]:
            self.roster.entries.remove(entry)
            self.roster.left_out[entry.name] = why
            self.say(f"{entry.name} is left out: {why}")
