"""What gpu.py does while there is time: the machine, the tests, the models, and one stage after the other.

Whatever fails is written into the results with its reason, and the rest goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from comparison.capacity import Capacity
from comparison.contestants import Contestant
from comparison.processes import START
from comparison.roster import Roster
from comparison.runner import Runner, Workload
from gpu_suite.budget import Budget, OutOfTime, ScriptError, run_script
from gpu_suite.contestants import Setup, beside_pool, contestants, needed_bytes, roster_of, workload_of
from gpu_suite.models import DTYPE_BYTES, GEOMETRIES, is_made
from gpu_suite.parity import Parity, marked_files, run_tests
from gpu_suite.report import Results
from gpu_suite.stages import WIDE, Forms, Stage, stages

LEAST = 10.0  # seconds: with less left, nothing new is begun
PARITY_SHARE = 0.25  # of the time, at most
FORMS_SHARE = 0.2
CELL_SHARE = 0.4  # of the time, at most, for one measurement with its warm-up, or for one start
MACHINE, MODELS = "machine", "models"


@dataclass(slots=True)
class Run:
    """One call: what it is about, how much time it has, and what it found. say: gets one line for people at a time."""

    setup: Setup
    budget: Budget
    results: Results
    out: Path
    tests: Path
    say: Callable[[str], None]
    least: float = LEAST
    _runner: Runner | None = field(default=None, init=False)

    def all(self, only: Sequence[str]) -> None:
        """Do what is missing, until the time is over. Whatever happens, every process ends."""
        wanted = [s for s in stages(self.setup.sizes, self.setup.device) if s.name in only or not only]
        self.results.given_up.clear()
        try:
            with self.budget.enforced():
                if self._knows_machine():
                    self._test()
                    self._measure(wanted)
        except OutOfTime:
            self.say("the time is over")
        finally:
            if self._runner is not None:
                self._runner.close()
            self.results.to_come = [stage.name for stage in wanted if not self.results.is_done(stage)]
            self._write()

    def _knows_machine(self) -> bool:
        if self.results.machine is None:
            command = [*self._start("gpu_suite.probe"), "--device", self.setup.device]
            for found in self._script(MACHINE, command, CELL_SHARE):
                self.results.machine = found
            self._write()
        return self.results.machine is not None

    def _test(self) -> None:
        if self.setup.device == "cpu":
            self.results.parity = Parity(error="they need a GPU")
        elif self.results.parity is None or not self.results.parity.is_done:
            self.say("parity tests")
            files, seconds = marked_files(self.tests), self.budget.part(PARITY_SHARE)
            self.results.parity = run_tests(files, self.out, seconds, self.results.parity, self._tested)

    def _tested(self, parity: Parity) -> None:
        self.results.parity = parity
        self._write()

    def _has_models(self) -> bool:
        setup = self.setup
        made = setup.models, setup.geometry, setup.group, setup.dtype
        if not is_made(*made):
            self.say(f"writing random weights of {setup.geometry}")
            command = [*self._start("gpu_suite.models"), str(setup.models)]
            command += ["--geometry", setup.geometry, "--group", str(setup.group), "--dtype", setup.dtype]
            self._script(MODELS, [*command, "--device", setup.device], CELL_SHARE)
        if found := is_made(*made):
            self.results.failed.pop(MODELS, None)
        return found

    def _measure(self, wanted: Sequence[Stage | Forms]) -> None:
        processes, self.results.absent = contestants(self.setup)
        todo = [stage for stage in wanted if not self.results.is_done(stage)]
        has_models = any(isinstance(stage, Stage) for stage in todo) and self._has_models()
        for stage in todo:
            if self.budget.left() < self.least:
                return
            if isinstance(stage, Forms):
                self._forms(stage)
            elif has_models:
                self._stage(stage, processes)

    def _stage(self, stage: Stage, processes: dict[str, Contestant]) -> None:
        setup, results = self.setup, self.results
        roster = roster_of(stage, setup, processes, results.absent | results.given_up)
        workload = workload_of(stage, setup, self.budget.part(CELL_SHARE))
        if self._runner is None:
            self._runner = self._new_runner(roster, workload)
        self._runner.use(roster, workload.plan, workload)
        for cell in self._runner.cells(results.done(stage)):
            results.add(stage, cell)
            results.facts |= {name: p.facts for name, p in roster.processes.items() if p.facts}
            self._write()
            self._runner.plan = replace(self._runner.plan, timeout=self.budget.part(CELL_SHARE))
        results.given_up |= roster.left_out
        self._write()

    def _new_runner(self, roster: Roster, workload: Workload) -> Runner:
        assert self.results.machine is not None
        return Runner(
            roster,
            workload.plan,
            workload,
            bandwidth=lambda: None,  # measured once: every probe starts a process
            say=self.say,
            bandwidths=[],
            capacity=Capacity(needed_bytes(self.setup)),
            left=self.budget.left,
            least=self.least,
            starts=self.results.starts,
        )

    def _forms(self, stage: Forms) -> None:
        """All that is missing of a number of rows at once, in one process."""
        done = self.results.forms_done()
        missing = [(r, c) for r in stage.rows for c in stage.confidences if (r, c) not in done]
        rows, confidences = ({str(pair[i]): None for pair in missing} for i in range(2))
        self.say(f"{stage.name}: {', '.join(rows)} rows")
        if self._runner is not None:
            self._runner.make_room(self._forms_bytes(stage))
        command = [*self._start("gpu_suite.decode_step"), "--device", self.setup.device]
        command += ["--model", self.setup.geometry, "--rows", ",".join(rows), "--context", str(stage.context)]
        command += ["--confidences", ",".join(confidences), "--repeats", str(stage.repeats)]
        for line in self._script(stage.name, command, FORMS_SHARE):
            self.results.add_form(line)
        self._write()

    def _forms_bytes(self, stage: Forms) -> int:
        trunk, size = GEOMETRIES[self.setup.geometry], DTYPE_BYTES[self.setup.dtype]
        return max(stage.rows) * stage.context * trunk.slot_bytes(size) + beside_pool(self.setup, WIDE)

    def _start(self, module: str) -> list[str]:
        return [sys.executable, str(self.setup.scripts / START.name), module]

    def _script(self, name: str, command: list[str], share: float) -> list[dict[str, Any]]:
        """The JSON objects that it printed, one a line; of one that failed too, which is noted."""
        self.results.failed.pop(name, None)
        try:
            printed = run_script(name.replace(" ", "-"), command, self.budget.part(share), self.setup.logs)
        except ScriptError as error:
            printed = error.output
            self.results.failed[name] = str(error)
            self.say(f"{name}: {error}")
        # What libraries print is no JSON, and of a program that was killed the last line is none.
        lines = [line for line in printed.splitlines(keepends=True) if line.startswith("{") and line.endswith("}\n")]
        return [json.loads(line) for line in lines]

    def _write(self) -> None:
        self.results.write(self.out)
