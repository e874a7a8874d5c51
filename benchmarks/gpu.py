"""Measures a machine with a GPU, in one command of limited time: parity tests, then speed. Usually called by gpu.sh.

    bash benchmarks/gpu.sh --out build/gpu --minutes 8

Writes results.json and table.md into OUT after every measurement, plots at the end. What is finished is kept: the same
command goes on with the rest. Every contestant has a process of its own, so what crashes or runs out of memory loses
only itself.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compare_contestants import Contestant
from compare_run import Runner
from gpu_model import DTYPE_BYTES, GEOMETRIES, is_made
from gpu_parity import ROOT, Parity, marked_files, run_tests
from gpu_report import RESULTS, Results, load_results, plot
from gpu_stages import Setup, Stage, contestants, roster_of, sizes_of, stages, workload_of
from hamburger.clients.arguments import count, list_of, positive

HERE = Path(__file__).parent
RESERVE = 15.0  # seconds at the end, for processes to end and plots to be drawn
LEAST = 10.0  # seconds: with less left, nothing new is begun
PARITY_SHARE = 0.25  # of the time, at most
CELL_SHARE = 0.4  # of the time, at most, for one measurement with its warm-up, or for one start
MODELS = "models"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results, plots and logs")
    parser.add_argument("--models", type=Path, help="folder for the random weights (default: OUT/models)")
    parser.add_argument("--minutes", type=positive, default=8.0, help="the whole command's time")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.2-1b")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16")
    parser.add_argument("--group", type=count, default=2, help="tokens that every group has: 2 to 16")
    parser.add_argument("--threads", type=count, default=4, help="CPU threads of every contestant")
    parser.add_argument("--only", type=list_of(str), default=[], metavar="NAME,NAME", help="these stages only")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of the parity tests")
    return parser


@dataclass(slots=True)
class Budget:
    """Seconds of time.monotonic()."""

    whole: float
    started: float

    @property
    def left(self) -> float:
        return self.started + self.whole - RESERVE - time.monotonic()

    def part(self, share: float) -> float:
        """At most this share of the whole, at least a second."""
        return max(1.0, min(self.left, share * self.whole))


def main(argv: list[str] | None = None) -> int:
    """Returns 0; 1 where a measurement or a test is missing or failed, 2 for settings that cannot be used, 130 for
    Ctrl-C."""
    args = arguments().parse_args(argv)
    budget = Budget(args.minutes * 60, time.monotonic())
    try:
        (args.out / "logs").mkdir(parents=True, exist_ok=True)
        results = _earlier(args)
        setup = _setup(args, budget)
    except (OSError, ValueError) as error:
        _say(f"gpu: {error}")
        return 2
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        todo = _run(args, setup, results, budget)
    except KeyboardInterrupt:
        _say("stopped: the same command goes on from here")
        return 130
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _say(f"gpu: {error}")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
        results.write(args.out)
    try:
        plot(results, args.out)
    except ImportError:
        _say("no plots: matplotlib is not installed")
    print(results.table())
    if todo:
        _say(f"not measured yet: {', '.join(todo)}. The same command goes on with it.")
    parity = results.parity
    return 1 if todo or (parity is not None and (parity.failed or not parity.is_done)) else 0


def _setup(args: argparse.Namespace, budget: Budget) -> Setup:
    """Raises ValueError for a group that cannot be forced, and for a stage that there is not."""
    if not 2 <= args.group <= 16:
        raise ValueError(f"group is {args.group}: it must be in [2, 16].")
    sizes = sizes_of(args.geometry, args.minutes)
    known = [stage.name for stage in stages(sizes, args.device)]
    if unknown := [name for name in args.only if name not in known]:
        raise ValueError(f"only names {', '.join(unknown)}: choose from {', '.join(known)}.")
    return Setup(
        models=args.models or args.out / MODELS,
        logs=args.out / "logs",
        geometry=args.geometry,
        group=args.group,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        sizes=sizes,
        start_seconds=budget.part(CELL_SHARE),
    )


def _run(args: argparse.Namespace, setup: Setup, results: Results, budget: Budget) -> list[str]:
    """Do what is missing while there is time; returns the names of what is missing still."""
    if results.machine is None:
        results.machine = _probe(args.device, budget)
        results.write(args.out)
    parity_runs = args.device != "cpu"
    if parity_runs and (results.parity is None or not results.parity.is_done):
        _say("parity tests")
        results.parity = run_tests(marked_files(args.tests), args.out, budget.part(PARITY_SHARE), results.parity)
        results.write(args.out)
    elif not parity_runs:
        results.parity = Parity(error="they need a GPU")
    if not is_made(setup.models, args.geometry, args.group, args.dtype):
        _say(f"writing random weights of {args.geometry}")
        command = [sys.executable, str(HERE / "gpu_model.py"), str(setup.models), "--geometry", args.geometry]
        command += ["--group", str(args.group), "--dtype", args.dtype, "--device", args.device]
        subprocess.run(command, timeout=budget.part(CELL_SHARE), check=True, stdout=sys.stderr)
    wanted = [stage for stage in stages(setup.sizes, setup.device) if stage.name in args.only or not args.only]
    processes, results.left_out = contestants(setup)
    if todo := [stage for stage in wanted if not results.is_done(stage)]:
        _measure(todo, setup, processes, results, budget, args.out)
    return [stage.name for stage in wanted if not results.is_done(stage)]


def _measure(
    todo: Sequence[Stage],
    setup: Setup,
    processes: dict[str, Contestant],
    results: Results,
    budget: Budget,
    out: Path,
) -> None:
    """Measure stages in order; whatever happens, every process ends."""
    assert results.machine is not None
    runner: Runner | None = None
    try:
        for stage in todo:
            if budget.left < LEAST:
                return
            there = {name: p for name, p in processes.items() if name not in results.left_out}
            roster, workload = roster_of(stage, setup, there), workload_of(stage, setup, budget.part(CELL_SHARE))
            if runner is None:
                bandwidths = [float(results.machine["bandwidth"])]  # measured once: every probe starts a process
                runner = Runner(roster, workload.plan, workload, lambda: None, _say, bandwidths)
            else:
                runner.use(roster, workload.plan, workload)
            for cell in runner.cells(results.done(stage)):
                results.add(stage, cell)
                results.facts |= {name: p.facts for name, p in roster.processes.items() if p.facts}
                results.write(out)
                if budget.left < LEAST:
                    return
                runner.plan = replace(runner.plan, timeout=budget.part(CELL_SHARE))
            results.left_out |= runner.roster.left_out
    finally:
        if runner is not None:
            runner.close()


def _probe(device: str, budget: Budget) -> dict[str, Any]:
    """What gpu_probe.py says of the device. Raises ValueError where it cannot."""
    command = [sys.executable, str(HERE / "gpu_probe.py"), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=budget.part(CELL_SHARE), check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"{device} cannot be measured: {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _earlier(args: argparse.Namespace) -> Results:
    """The run in OUT, or a new one. Raises ValueError for one with other settings."""
    settings = {key: getattr(args, key) for key in ("device", "geometry", "dtype", "group", "minutes", "threads")}
    file = args.out / RESULTS
    if not file.is_file():
        return Results(settings | {"date": datetime.now(UTC).date().isoformat()})
    try:
        results = load_results(file)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be gone on with ({error}): give another --out.") from None
    if other := [key for key, value in settings.items() if results.settings.get(key) != value]:
        raise ValueError(f"{file} was measured with another {', '.join(other)}: give the same, or another --out.")
    return results


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
