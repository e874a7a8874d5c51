"""The scheduler under real traces: measure steps of the model, replay hours of requests in seconds, check in real time.

    python benchmarks/replay.py --out docs/results/replay             everything: some minutes
    python benchmarks/replay.py --costs docs/results/replay.json ...  with costs and groups of an earlier run

1. The cost of a step and the sizes of groups are measured on the real HAMburger (simulation.measurement). The plain
   base is that model with groups of one token: two measurements of the same work differ by a tenth, more than much of
   what is asked. It is replayed with settled slots too, which cost what one chunk of old tokens was measured to.
2. The traces (benchmarks/traces, or --traces FOLDER with longer files) go through the real EngineCore, scheduler,
   blocks and prefix cache in virtual time (simulation.simulator); lengths are scaled to the context, times to what the
   base can do.
3. A short replay in real time says how far off that is (simulation.live_replay).
Writes OUT.json, OUT.md and OUT-{slots,load,pool,cost}.png. Needs the train extra (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from hamburger.engine.dial.confidence_dial import levels_between
from hamburger.engine.types.config import EngineArgs, EngineConfig
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.settle_settings import settle_settings
from hamburger.model.checkpoints.sources import resolve_source
from simulation.costs import CostModel
from simulation.dial_study import dial_study
from simulation.report import Pictures, write_report
from simulation.simulator import DrawnSizes, drawn_with_mean
from simulation.studies import LOADS, USUAL_LOAD, Scenario, Studies
from simulation.summaries import Target, config_json
from simulation.traces import SAMPLES, Trace, read_trace, scale

# Prompts, outputs: Azure's as they are; of Mooncake's prompts, one hash becomes one block of 32 slots.
TRACES = {
    "azure_conv": (Fraction(1), Fraction(1)),
    "azure_code": (Fraction(1), Fraction(1)),
    "mooncake_conversation": (Fraction(1, 16), Fraction(1, 4)),
}
MAX_GROUP = 4
BLOCK_SIZE = 32
VARIED_TRACES = ("azure_conv", "mooncake_conversation")
LIVE_SCALE = Fraction(1, 8)


def main() -> int:
    args = arguments()
    known = json.loads(args.costs.read_text()) if args.costs else measure_model(args)
    studies = Studies(engine_config(args), all_scenarios(args, known), Target(args.ttft, args.tpot), say)
    result: dict[str, Any] = {"machine": known["machine"]}
    result["models"] = {"hamburger": known["models"]["hamburger"]}  # older files have a base of its own
    result |= {"settings": config_json(studies.config), "target": {"ttft": args.ttft, "tpot": args.tpot}}
    pictures = simulate(args, known, studies, result)
    if args.live_requests:
        result["live"] = check_live(args, known, say)
    elif "live" in known:
        result["live"] = known["live"]
    write_report(args.out, result, pictures)
    return 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.json, OUT.md and four OUT-*.png")
    parser.add_argument("--costs", type=Path, help="an earlier OUT.json: take its costs and groups, measure nothing")
    parser.add_argument("--traces", type=Path, default=SAMPLES, help="folder of the trace files (default: the samples)")
    parser.add_argument("--requests", type=int, help="only the first so many of each trace")
    parser.add_argument("--model", help="the HAMburger (default: the embedded one)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--confidences", type=float, nargs="+", default=[0.8, 0.3], help="of the replayed models")
    parser.add_argument("--dial-target", type=float, default=0.1, help="of confidence auto, seconds a token")
    parser.add_argument("--mean-group", type=float, default=2.0, help="of one more model, whose groups are drawn")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--seats", type=int, default=64, help="max_num_seqs")
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_slots")
    parser.add_argument("--pool-slots", type=int, default=8 * 8192, help="of the KV pool, where it is not varied")
    parser.add_argument("--ttft", type=float, default=10.0, help="goodput: most seconds to the first token")
    parser.add_argument("--tpot", type=float, default=0.5, help="goodput: most seconds a token after it")
    parser.add_argument("--measure-seconds", type=float, default=60.0, help="to time the steps of each model")
    parser.add_argument("--answers", type=int, default=16, help="answers whose groups are counted")
    parser.add_argument("--live-requests", type=int, default=40, help="of the replay in real time; 0: none")
    parser.add_argument("--live-load", type=float, default=0.7, help="of what the model can do, as simulated")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Of the simulation; nothing waits too long there."""
    return EngineConfig(
        max_model_len=args.max_model_len,
        max_num_seqs=args.seats,
        max_num_batched_slots=args.budget,
        block_size=BLOCK_SIZE,
        num_blocks=-(-args.pool_slots // BLOCK_SIZE),
        eos_token_ids=(),
        max_group=MAX_GROUP,
        max_queue_seconds=math.inf,
    )


def engine_args(args: argparse.Namespace, model: str | None) -> EngineArgs:
    return EngineArgs(
        model=model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.seats,
        max_num_batched_slots=args.budget,
        kv_cache_memory=2 << 30,
        max_queue_seconds=math.inf,
        groups="composed",
    )


def measure_model(args: argparse.Namespace) -> dict[str, Any]:
    """Its costs and groups. Imported here because it imports torch."""
    from simulation.measurement import machine, measure, settling_seconds

    of = measure(engine_args(args, args.model), measured_at(args), args.measure_seconds, args.answers, say)
    costs = replace(of.costs, settled_chunk=settling_seconds(engine_args(args, args.model), say))
    model = {
        "model": of.info.model,
        "dtype": of.info.dtype,
        "quantization": of.info.quantization,
        "costs": costs.as_json(),
        "group_shares": {f"{confidence:g}": shares for confidence, shares in of.shares.items()},
    }
    found = {"machine": machine(), "models": {"hamburger": model}}
    args.out.parent.mkdir(parents=True, exist_ok=True)  # now, for --costs, should what follows be interrupted
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def measured_at(args: argparse.Namespace) -> list[float]:
    """The confidences at which groups are counted: those that are replayed, and the dial's levels between them."""
    return sorted({*args.confidences, *levels_between(min(args.confidences), max(args.confidences))}, reverse=True)


def measured_scenarios(known: dict[str, Any], seed: int) -> dict[str, Scenario]:
    """Confidence -> the HAMburger with the groups that it emitted at it."""
    found = known["models"]["hamburger"]
    costs, scenarios = CostModel.from_json(found["costs"]), {}
    for confidence, shares in found["group_shares"].items():
        sizes = DrawnSizes(tuple(shares), seed)
        scenarios[confidence] = Scenario(f"composed at {confidence} (g {sizes.mean:.2f})", costs, sizes)
    return scenarios


def all_scenarios(args: argparse.Namespace, known: dict[str, Any]) -> list[Scenario]:
    """The plain base first, groups of the asked mean last."""
    costs = CostModel.from_json(known["models"]["hamburger"]["costs"])
    if not costs.settled_chunk:
        raise SystemExit(f"{args.costs} does not tell what settling costs: measure again, without --costs.")
    # The costs are of the embedded model.
    settling = Settling.of_model(settle_settings(resolve_source(None)))
    drawn = drawn_with_mean(args.mean_group, MAX_GROUP, args.seed)
    measured = measured_scenarios(known, args.seed)
    if lacking := [f"{c:g}" for c in measured_at(args) if f"{c:g}" not in measured]:
        raise SystemExit(f"{args.costs} tells of no groups at {', '.join(lacking)}: measure again, without --costs.")
    return [
        Scenario("plain base", costs, DrawnSizes((1.0,))),
        Scenario("plain base, settled slots", costs, DrawnSizes((1.0,)), settling),
        *[measured[f"{confidence:g}"] for confidence in args.confidences],
        Scenario(f"groups drawn (g {drawn.mean:.2f})", costs, drawn),
    ]


def load_trace(args: argparse.Namespace, name: str) -> Trace:
    whose, kind = name.split("_", 1)
    paths = sorted(args.traces.glob(f"{whose}*{kind}.jsonl*"))
    if not paths:
        raise SystemExit(f"{args.traces} holds no trace {whose}*{kind}.jsonl.gz.")
    return scale(read_trace(paths[0], args.requests), *TRACES[name], args.max_model_len)


def simulate(args: argparse.Namespace, known: dict[str, Any], studies: Studies, result: dict[str, Any]) -> Pictures:
    """Fills `result`, and returns what is only drawn: the slots over time."""
    traces = {name: load_trace(args, name) for name in TRACES}
    capacity = {name: studies.capacity(trace) for name, trace in traces.items()}
    result["traces"] = [
        {
            "trace": name,
            "requests": len(trace.rows),
            "prompt_tokens": sum(row.prompt_tokens for row in trace.rows) / len(trace.rows),
            "output_tokens": sum(row.output_tokens for row in trace.rows) / len(trace.rows),
            "shortened": trace.num_shortened,
            "base_capacity": capacity[name],
        }
        for name, trace in traces.items()
    ]
    result["loads"] = [
        row
        for name, trace in traces.items()
        for row in studies.loads(trace, capacity[name], LOADS if name in VARIED_TRACES else (USUAL_LOAD,))
    ]
    result["pools"] = [row for name in VARIED_TRACES for row in studies.pools(traces[name], capacity[name])]
    result["budgets"] = studies.budgets(traces["azure_conv"], capacity["azure_conv"])
    result["growth"] = studies.growth((1.0, 1.5, 2.0, 3.0), MAX_GROUP)
    measured = measured_scenarios(known, args.seed)
    sizes = {c: measured[f"{c:g}"].sizes for c in levels_between(min(args.confidences), max(args.confidences))}
    result["dial"] = [
        row
        for name in (VARIED_TRACES if len(sizes) > 1 else ())
        for row in dial_study(
            studies, traces[name], capacity[name], measured[f"{args.confidences[0]:g}"], sizes, args.dial_target
        )
    ]
    result["dial_target"] = args.dial_target
    trace, rate = traces["azure_conv"], capacity["azure_conv"]
    result["costs"] = [row for scenario in studies.scenarios for row in studies.costs(scenario)]
    moments = {scenario.name: studies.slots_over_time(trace, rate, scenario) for scenario in studies.compared}
    return Pictures(moments, trace.name, USUAL_LOAD)


def check_live(args: argparse.Namespace, known: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The first requests of azure_conv, shortened, in real time, at a share of what the simulation says is possible;
    then the same in virtual time."""
    from simulation.live_replay import compare, run_live

    confidence = min(map(float, known["models"]["hamburger"]["group_shares"]))
    scenario = measured_scenarios(known, args.seed)[f"{confidence:g}"]
    trace = scale(read_trace(SAMPLES / "azure_conv.jsonl.gz", args.live_requests), LIVE_SCALE, LIVE_SCALE, 1024)
    studies = Studies(engine_config(args), [scenario], Target(args.ttft, args.tpot), say)
    timed = trace.at_rate(args.live_load * studies.capacity(trace))
    run, info = run_live(engine_args(args, args.model), timed, confidence, say)
    return {"confidence": confidence, "load": args.live_load, **compare(run, info, timed, scenario.costs)}


if __name__ == "__main__":
    sys.exit(main())
