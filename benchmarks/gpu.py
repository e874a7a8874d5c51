"""Measures a machine with a GPU, in one command of limited time: parity tests, then speed. Usually called by gpu.sh.

    bash benchmarks/gpu.sh --out build/gpu --minutes 8

Writes results.json and table.md into OUT after every measurement, plots at the end. What is finished is kept: the same
command goes on with the rest, with more or fewer minutes. Every contestant has a process of its own, so what crashes or
runs out of memory loses only itself.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_suite.budget import Budget
from gpu_suite.contestants import Setup
from gpu_suite.models import DTYPE_BYTES, GEOMETRIES
from gpu_suite.parity import ROOT
from gpu_suite.report import RESULTS, Results, load_results, plot
from gpu_suite.run import CELL_SHARE, LEAST, Run
from gpu_suite.stages import output_of, sizes_of, stages
from hamburger.clients.arguments import count, list_of, positive
from hamburger.engine.types.config import EngineArgs

HERE = Path(__file__).parent
RESERVE = 15.0  # seconds at the end, for processes to end and plots to be drawn
COMPARED = ("device", "geometry", "dtype", "group", "threads", "engine")  # what all calls of an OUT have in common


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results, plots and logs")
    parser.add_argument("--models", type=Path, help="folder for the random weights (default: OUT/models)")
    parser.add_argument("--minutes", type=positive, default=8.0, help="this call's time")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.2-1b")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bfloat16")
    parser.add_argument("--group", type=count, default=2, help="tokens that every group has: 2 to 16")
    parser.add_argument("--threads", type=count, default=4, help="CPU threads of every contestant")
    parser.add_argument("--engine", type=_setting, action="append", default=[], metavar="NAME=VALUE",
                        help="a setting of every engine of ours; may be repeated")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a dry run: --geometry tiny --device cpu --dtype float32")
    parser.add_argument("--only", type=list_of(str), default=[], metavar="NAME,NAME", help="these stages only")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of the parity tests")
    parser.add_argument("--scripts", type=Path, default=HERE, help="folder of the workers, for tests")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns 0; 1 where a measurement or a test is missing or failed, 2 for settings that cannot be used, 130 for
    Ctrl-C."""
    args = arguments().parse_args(argv)
    if args.tiny:
        args.geometry, args.device, args.dtype = "tiny", "cpu", "float32"
    args.engine = dict(args.engine)
    whole = args.minutes * 60
    budget = Budget(whole, time.monotonic(), min(RESERVE, whole / 4))
    try:
        (args.out / "logs").mkdir(parents=True, exist_ok=True)
        results = _earlier(args)
        run = _run(args, results, budget)
    except (OSError, ValueError) as error:
        _say(f"gpu: {error}")
        return 2
    # Both, as a shell that runs this beside itself has SIGINT ignored.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        run.all(args.only)
    except KeyboardInterrupt:
        _say("stopped: the same command goes on from here")
        return 130
    except OSError as error:
        _say(f"gpu: {error}")
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return _report(results, args.out)


def _report(results: Results, out: Path) -> int:
    try:
        plot(results, out)
    except ImportError:
        _say("no plots: matplotlib is not installed")
    print(results.table())
    if results.to_come:
        _say(f"not measured yet: {', '.join(results.to_come)}. The same command goes on with it.")
    parity = results.parity
    tested = parity is not None and parity.is_done and not parity.failed
    return 0 if tested and not results.to_come and not results.failed else 1


def _run(args: argparse.Namespace, results: Results, budget: Budget) -> Run:
    """Raises ValueError for a group that cannot be forced, a stage that there is not, and an unknown setting."""
    if not 2 <= args.group <= 16:
        raise ValueError(f"group is {args.group}: it must be in [2, 16].")
    sizes = replace(sizes_of(args.geometry), output=results.settings["output"])
    known = [stage.name for stage in stages(sizes, args.device)]
    if unknown := [name for name in args.only if name not in known]:
        raise ValueError(f"only names {', '.join(unknown)}: choose from {', '.join(known)}.")
    there = [field.name for field in fields(EngineArgs)]
    if unknown := [name for name in args.engine if name not in there]:
        raise ValueError(f"engine names {', '.join(unknown)}: choose from {', '.join(there)}.")
    setup = Setup(
        models=args.models or args.out / "models",
        logs=args.out / "logs",
        scripts=args.scripts,
        geometry=args.geometry,
        group=args.group,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        sizes=sizes,
        engine=args.engine,
        start_seconds=CELL_SHARE * budget.whole,
        left=budget.left,
    )
    return Run(setup, budget, results, args.out, args.tests, _say, min(LEAST, budget.whole / 20))


def _setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, whose value is JSON or, where it is none, a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _earlier(args: argparse.Namespace) -> Results:
    """The run in OUT, or a new one. Raises ValueError for one with other settings."""
    settings = {key: getattr(args, key) for key in COMPARED}
    file = args.out / RESULTS
    if not file.is_file():
        made = {"output": output_of(args.geometry, args.minutes), "date": datetime.now(UTC).date().isoformat()}
        return Results(settings | made)
    try:
        results = load_results(file)
        results.settings["output"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} cannot be gone on with ({error}): give another --out.") from None
    if other := [key for key, value in settings.items() if results.settings.get(key) != value]:
        raise ValueError(f"{file} was measured with another {', '.join(other)}: give the same, or another --out.")
    return results


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
