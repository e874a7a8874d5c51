"""Ourselves beside others, in one run: HAMburger at several confidences, the plain base, llama.cpp and transformers.

    python benchmarks/compare.py --streams 1,4,16,64 --out build/compare

Every contestant runs in a process of its own and is stopped still while another is measured; each round measures all of
them, one after the other, with the same requests, so that a machine whose speed drifts still gives fair ratios. Writes
results.json, table.md and plots into OUT after every measurement; --resume goes on where a run was ended.
Peers need the extra "bench"; one that is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from comparison.limits import measure_bandwidth
from comparison.report import RESULTS, Results, load_results, plot
from comparison.roster import OURS, Roster, Setup, build_roster
from comparison.runner import Plan, Runner, Workload
from comparison.workload import TRACES, PromptWriter, read_lengths, scale
from hamburger.clients.arguments import count, list_of, positive, unit_interval, whole
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.model.checkpoints.sources import EMBEDDED_BASE, CheckpointError, resolve_source
from hamburger.server.setting_values import parse_bytes
from host.machine import processor

NOT_COMPARED = ("out", "resume", "timeout", "only")  # settings that do not change what a cell means


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json, table.md, plots and logs")
    parser.add_argument("--streams", type=list_of(count), default=[1, 4, 16, 64], metavar="N,N")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--requests-per-stream", type=count, default=2, metavar="N")
    parser.add_argument("--least-requests", type=count, default=8, metavar="N", help="of a level with few streams")
    parser.add_argument("--context", type=count, default=512, help="tokens that the traces' lengths are scaled to")
    parser.add_argument("--traces", type=Path, default=TRACES, help="JSON Lines: source, prompt_tokens, output_tokens")
    parser.add_argument("--sources", type=list_of(str), default=[], help="of the traces file (default: all)")
    parser.add_argument(
        "--confidences", type=list_of(unit_interval), default=[0.3, 0.5, 1.0], help="besides the default confidence"
    )
    parser.add_argument("--model", help="the HAMburger (default: the embedded one)")
    parser.add_argument("--base", default=EMBEDDED_BASE, help="the plain base: builtin, or a GGUF file")
    parser.add_argument("--threads", type=count, default=os.cpu_count() or 1, help="of every contestant")
    parser.add_argument("--kv-cache-memory", type=parse_bytes, default=2 << 30, help="of ours, such as 2GiB")
    parser.add_argument("--only", type=list_of(str), default=[], metavar="NAME,NAME", help="these contestants only")
    parser.add_argument(
        "--llama-server", type=Path, metavar="FILE", help="llama-cpp-python's examples/server/server.py"
    )
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--timeout", type=positive, default=900.0, metavar="S", help="for one measurement")
    parser.add_argument("--resume", action="store_true", help="keep what OUT holds, and measure the rest")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns 0; 1 where nothing was measured, 2 for settings that cannot be used, 130 for Ctrl-C."""
    args = arguments().parse_args(argv)
    try:
        (args.out / "logs").mkdir(parents=True, exist_ok=True)
        roster, workload = _prepare(args)
        settings = {key: _plain(value) for key, value in vars(args).items() if key not in NOT_COMPARED}
        results = _earlier(args.out / RESULTS, settings) if args.resume else None
    except (OSError, ValueError, CheckpointError) as error:
        _say(f"compare: {error}")
        return 2
    ours = [entry.name for entry in roster.entries if entry.process in OURS]
    names = [entry.name for entry in roster.entries]
    earlier = results or Results(settings, _machine(args.threads), [], [])
    earlier.names = list(dict.fromkeys([*earlier.names, *names]))
    earlier.ours = list(dict.fromkeys([*earlier.ours, *ours]))
    earlier.left_out = dict(roster.left_out)
    for name, why in roster.left_out.items():
        _say(f"{name} is left out: {why}")
    code = _run(args, roster, workload, earlier)
    if any(cell.figures for cell in earlier.cells):
        try:
            plot(earlier, args.out)
        except ImportError:
            _say("no plots: matplotlib is not installed (pip install -e '.[bench]')")
        print(earlier.table())
    return code


def _prepare(args: argparse.Namespace) -> tuple[Roster, Workload]:
    """Raises ValueError or CheckpointError for settings that cannot be used."""
    source = resolve_source(args.base)
    tokenizer = Tokenizer.load(source.tokenizer_path)
    writer = PromptWriter(tokenizer)
    lengths = scale(read_lengths(args.traces, args.sources), args.context, writer.least_tokens)
    end = tokenizer.eos_token_id
    roster = build_roster(
        Setup(
            model=args.model,
            base=args.base,
            context=args.context,
            threads=args.threads,
            kv_cache_memory=args.kv_cache_memory,
            confidences=args.confidences,
            most_streams=max(args.streams),
            logs=args.out / "logs",
            end_tokens=() if end is None else (end,),
            llama_server=args.llama_server,
        )
    )
    if args.only:
        roster.keep(args.only)
    plan = Plan(
        streams=args.streams,
        rounds=args.rounds,
        requests_per_stream=args.requests_per_stream,
        least_requests=args.least_requests,
        seed=args.seed,
        timeout=args.timeout,
    )
    return roster, Workload(lengths, writer, plan)


def _run(args: argparse.Namespace, roster: Roster, workload: Workload, results: Results) -> int:
    """Measure what is missing; whatever happens, every process ends and what was measured is written."""

    def bandwidth() -> float | None:
        try:
            return measure_bandwidth(args.threads)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _say(f"the memory bandwidth cannot be measured: {error}")
            return None

    runner = Runner(roster, workload.plan, workload, bandwidth, _say, results.bandwidths)
    done = {cell.key for cell in results.cells if cell.figures is not None}
    results.cells = [cell for cell in results.cells if cell.key in done]
    # Like Ctrl-C, so that no contestant is left standing still.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        runner.start()
        for cell in runner.cells(done):
            results.cells.append(cell)
            _note(results, runner)
            results.write(args.out)
    except KeyboardInterrupt:
        _say("stopped: --resume goes on from here")
        return 130
    finally:
        runner.close()
        signal.signal(signal.SIGTERM, before)
        _note(results, runner)
        results.write(args.out)
    return 0 if any(cell.figures for cell in results.cells) else 1


def _note(results: Results, runner: Runner) -> None:
    results.left_out = dict(runner.roster.left_out)
    results.facts |= {name: process.facts for name, process in runner.roster.processes.items() if process.facts}


def _earlier(file: Path, settings: dict[str, Any]) -> Results | None:
    """The run in `file`, None where there is none. Raises ValueError for a run with other settings."""
    if not file.is_file():
        return None
    try:
        results = load_results(file)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be resumed ({error}): leave --resume out, or give another --out.") from None
    other = [key for key, value in settings.items() if results.settings.get(key) != value]
    if other:
        raise ValueError(f"{file} was measured with another {', '.join(other)}: give the same, or another --out.")
    return results


def _plain(value: Any) -> Any:
    """As results tell it: of a file its name, as they are read elsewhere."""
    return value.name if isinstance(value, Path) else value


def _machine(threads: int) -> dict[str, Any]:
    found: dict[str, Any] = {"CPU": processor(), "threads": threads}
    for package in ("torch", "transformers", "llama-cpp-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
