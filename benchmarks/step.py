"""What decoding costs in one engine: a macro-step of the HAMburger beside the plain base.

    python benchmarks/step.py --streams 1,2,4,8,16,64 --out docs/results/step.json
    python benchmarks/step.py --groups composed --out docs/results/step-composed.json

Both models lie in this process and answer the same prompts, others in each round, with nothing between the clock and
the core: no HTTP, no messages, no text. Every measurement is of `--steps` macro-steps of full batches that only decode;
all take turns, and who begins changes from round to round. Reported, medians over rounds: milliseconds a macro-step and
where they go, tokens a macro-step and sequence (g), tokens/s, speed over the base's and over confidence 1. Beside the
time of linears, attention and head stands how much of the machine's roofline it reaches: what their bytes and products
take at least, at rates that are measured in the same run (roofline/rates.py). --plot draws it by streams.

Verified groups: without drafts (1) and with as many as pay (auto); `of_target` is the speed over confidence 1 beside
g / (cost(rows) + drafts r), where cost and r, of a step and a micro-step over a step of one row, are what the engine
measured when it started. Composed groups: confidences from 1 to 0; `of_target` is the speed over the base's beside
g / (1 + (g - 1) r), with r, the merge of a token included, from steps at confidence 0 against those at 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hamburger.clients.prompts import built_in_prompts
from hamburger.engine.build import build_core
from hamburger.engine.drafting.costs import MeasuredCosts, StepCosts
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import AbortRequest, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import resolve_source
from host.machine import processor
from roofline.clocked import BOUNDED, PARTS, ClockedCore
from roofline.rates import Rates, measure_rates

BASE, AUTO = "base", "auto"
PROMPT_WORDS = 40
MOST_TOKENS = 4000  # never reached: answers are cut after so many steps


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of one contestant in one round: seconds of all and of each of PARTS, the tokens that they emitted, the
    slots that these take, drafts that were checked, and micro-steps of the batch. bounds: seconds that a step's BOUNDED
    parts take at least."""

    streams: int
    round: int
    name: str
    steps: int
    seconds: float
    tokens: int
    kv_slots: int
    drafts: int
    micro_steps: int
    parts: tuple[float, ...] = (0.0,) * len(PARTS)
    bounds: dict[str, float] | None = None

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of one sequence."""
        return self.tokens / (self.steps * self.streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the HAMburger (default: the embedded one)")
    parser.add_argument("--base", default="builtin", help="the plain base under it")
    parser.add_argument("--streams", type=_integers, default=[1, 4, 16], help="of a batch, with commas")
    parser.add_argument("--groups", choices=("verified", "composed"), default="verified")
    parser.add_argument(
        "--confidences", type=_fractions, default=[0.8, 0.7, 0.5, 0.3], help="of composed groups, besides 0 and 1"
    )
    parser.add_argument("--steps", type=int, default=48, help="macro-steps of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--plot", type=Path, help="picture of parts and rooflines by streams (needs the train extra)")
    args = parser.parse_args()
    rates = measure_rates(torch.get_num_threads())
    cores = {name: _clocked(args, name) for name in (BASE, "hamburger")}
    names = [BASE, "1", AUTO]
    if args.groups == "composed":
        names = [BASE, *(f"{c:g}" for c in [1.0, *args.confidences, 0.0])]
    found = []
    for streams in args.streams:
        for round_ in range(args.rounds + 1):
            turn = round_ % len(names)
            for name in names[turn:] + names[:turn]:
                core = cores[BASE if name == BASE else "hamburger"]
                measured = _measure(core, name, streams, round_, args.steps, rates)
                if round_ > 0:  # the first warms up
                    found.append(measured)
    costs = cores["hamburger"].costs
    rows = [row for streams in args.streams for row in report([m for m in found if m.streams == streams], costs)]
    print(table(rows))
    if args.out:
        told = {"date": datetime.now(UTC).date().isoformat(), "processor": processor(), "torch": torch.__version__}
        settings = {"threads": torch.get_num_threads(), "steps": args.steps, "rounds": args.rounds}
        settings |= {"groups": args.groups, "rates": asdict(rates)}
        measured_ = [asdict(m) for m in found]
        value = {
            **told,
            **settings,
            "quantization": args.quantization,
            "costs": None if costs is None else asdict(costs),
            "rows": rows,
            "measured": measured_,
        }
        args.out.write_text(json.dumps(value) + "\n")
    if args.plot:
        from roofline.plot import plot_parts

        plot_parts([row for row in rows if row["name"] == names[1]], args.plot)


def report(found: list[Measured], costs: MeasuredCosts | None = None) -> list[dict[str, Any]]:
    """Rows of one number of streams, in the order in which contestants were first measured. Ratios are taken within a
    round."""
    by_round = {(m.round, m.name): m for m in found}
    rounds = sorted({m.round for m in found})

    def over(name: str, other: str) -> list[float]:
        pairs = [(by_round[r, name].tokens_per_second, by_round[r, other].tokens_per_second) for r in rounds]
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        return [statistics.median(ratios), ratios[0], ratios[-1]]

    rows = []
    for name in dict.fromkeys(m.name for m in found):
        own = [m for m in found if m.name == name]
        rows.append(
            {
                "streams": own[0].streams,
                "name": name,
                "parts_ms": [1000 * statistics.median(m.parts[i] / m.steps for m in own) for i in range(len(PARTS))],
                "bounds_ms": {
                    part: 1000 * statistics.median(m.bounds[part] for m in own if m.bounds is not None)
                    for part in (BOUNDED if own[0].bounds is not None else ())
                },
                "ms": 1000 * statistics.median(m.step_seconds for m in own),
                "tokens_per_step": statistics.median(m.tokens_per_step for m in own),
                "tokens_per_kv": statistics.median(m.tokens / m.kv_slots for m in own),
                "drafts_per_step": statistics.median(m.drafts / m.steps for m in own),
                "tokens_per_second": statistics.median(m.tokens_per_second for m in own),
                "over_base": over(name, BASE),
                "over_1": over(name, "1"),
                "of_target": _of_target(name, own, by_round, rounds, costs),
            }
        )
    return rows


def _of_target(
    name: str, own: list[Measured], by_round: dict[tuple[int, str], Measured], rounds: list[int],
    costs: MeasuredCosts | None,
) -> float | None:  # fmt: skip
    """Its speed beside what tokens a macro-step and the costs of rows and micro-steps allow."""
    if name == AUTO and costs is not None:
        steps = StepCosts(costs)

        def expected(m: Measured) -> float:
            taken = steps.step(m.streams + m.drafts / m.steps) + m.micro_steps / m.steps * steps.micro_step(m.streams)
            return m.tokens_per_step / (taken / steps.step(m.streams))

        shares = [m.tokens_per_second / by_round[m.round, "1"].tokens_per_second / expected(m) for m in own]
        return statistics.median(shares)
    if (rounds[0], "0") not in by_round:
        return None
    g = statistics.median(m.tokens_per_step for m in own)
    cost = statistics.median(_composed_cost(*(by_round[r, key] for key in (BASE, "0", "1"))) for r in rounds)
    speeds = [m.tokens_per_second / by_round[m.round, BASE].tokens_per_second for m in own]
    return statistics.median(speeds) / (g / (1 + (g - 1) * cost))


def _composed_cost(base: Measured, full: Measured, single: Measured) -> float:
    """Of a micro-step over a step of the base."""
    added = full.tokens_per_step - single.tokens_per_step
    return (full.step_seconds - single.step_seconds) / added / base.step_seconds


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["streams", "confidence", "ms a macro-step", *PARTS, "g", "tokens per KV", "drafts a step", "tok/s"]
    heads += ["over base (range)", "over 1 (range)", "of what costs allow"]
    lines = [f"| {' | '.join(heads)} |", "| ---: | --- |" + " ---: |" * (len(heads) - 2)]
    for row in rows:
        ratios = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in (row["over_base"], row["over_1"])]
        target = "" if row["of_target"] is None else f"{row['of_target']:.2f}"
        lines.append(
            f"| {row['streams']} | {row['name']} | {row['ms']:.2f} "
            f"| {' | '.join(_part(row, i) for i in range(len(PARTS)))} | {row['tokens_per_step']:.2f} "
            f"| {row['tokens_per_kv']:.2f} | {row['drafts_per_step']:.1f} | {row['tokens_per_second']:.0f} "
            f"| {' | '.join(ratios)} | {target} |"
        )
    return "\n".join(lines)


def _part(row: dict[str, Any], index: int) -> str:
    """Milliseconds, and the share of the roofline where there is one."""
    ms, bound = row["parts_ms"][index], row["bounds_ms"].get(PARTS[index])
    return f"{ms:.2f}" if bound is None or not ms else f"{ms:.2f} ({bound / ms:.2f})"


def _clocked(args: argparse.Namespace, name: str) -> ClockedCore:
    """With prompts for the largest batch; every round begins one further."""
    model, base = (args.base, None) if name == BASE else (args.model, None if args.model is None else args.base)
    most = max(args.streams)
    core, _ = build_core(
        EngineArgs(
            model=model, base=base, quantization=args.quantization, max_num_seqs=most, prefix_cache=False,
            groups="verified" if name == BASE else args.groups,
        )
    )  # fmt: skip
    tokenizer = Tokenizer.load(resolve_source(model, base).tokenizer_path)
    chats = [[{"role": "user", "content": text}] for text in built_in_prompts(most + args.rounds, PROMPT_WORDS, seed=0)]
    return ClockedCore(core, [tokenizer.encode(tokenizer.apply_chat_template(chat)) for chat in chats])


def _measure(of: ClockedCore, name: str, streams: int, round_: int, steps: int, rates: Rates) -> Measured:
    core = of.core
    confidence = {BASE: 1.0, AUTO: 0.0}.get(name) if name in (BASE, AUTO) else float(name)
    params = SamplingParams(temperature=0, ignore_eos=True, confidence=confidence, max_tokens=MOST_TOKENS)
    waiting = set()
    for index, prompt in enumerate(of.prompts[round_ : round_ + streams]):
        waiting.add(str(index))
        core.add(SubmitRequest(str(index), prompt, params, time.monotonic()))
    while waiting:
        waiting -= {output.request_id for output in core.step().outputs}
    found = of.steps(steps)
    for index in range(streams):
        core.abort(AbortRequest(str(index)))
    slots = found.tokens if core.config.groups == "verified" else found.groups
    return Measured(
        streams, round_, name, steps, found.seconds, found.tokens, slots, found.drafts, found.micro_steps, found.parts,
        of.bounds(found, rates),
    )  # fmt: skip


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _fractions(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
