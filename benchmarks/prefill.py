"""What a prompt costs: prefill in one step, by its parts, beside the machine's roofline.

    python benchmarks/prefill.py --tokens 128,512,4096 --out docs/results/prefill.json

Each prompt is another text, read in one macro-step that emits its first token. Medians over rounds, in which the
lengths take turns. *of the rate*: what the products of the linears alone take at the rates that are measured in the
same run (roofline/rates.py), beside the whole step. *of the roofline*: what linears, attention and head take at least.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hamburger.clients.arguments import count, list_of
from hamburger.engine.build import build_core
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from host.machine import processor
from roofline.clocked import PARTS, ClockedCore, Steps
from roofline.rates import Rates, measure_rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", help="a model with CPU kernels (default: the embedded base)")
    parser.add_argument("--tokens", type=list_of(count), default=[128, 512, 4096], metavar="N,N")
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    args = parser.parse_args()
    rates = measure_rates(torch.get_num_threads())
    most = max(args.tokens)
    core, _ = build_core(
        EngineArgs(
            model=args.model, max_num_seqs=1, max_num_batched_slots=most, max_model_len=most + 1, prefix_cache=False
        )
    )  # fmt: skip
    clocked = ClockedCore(core, [])
    found: dict[int, list[dict[str, Any]]] = {tokens: [] for tokens in args.tokens}
    for round_ in range(args.rounds + 1):
        for tokens in args.tokens:
            measured = one(clocked, rates, prefill(clocked, tokens, seed=round_))
            if round_ > 0:  # the first warms up
                found[tokens].append(measured)
    rows = [median_of(own) for own in found.values()]
    print(table(rows))
    if args.out:
        told = {"date": datetime.now(UTC).date().isoformat(), "processor": processor(), "torch": torch.__version__}
        settings = {"threads": torch.get_num_threads(), "rounds": args.rounds, "rates": asdict(rates)}
        args.out.write_text(json.dumps({**told, **settings, "rows": rows}, indent=1) + "\n")


def prefill(clocked: ClockedCore, tokens: int, seed: int) -> Steps:
    """One step of so many prompt tokens, drawn by the seed."""
    core = clocked.core
    drawn = random.Random(seed).choices(range(1000, clocked.vocab_size), k=tokens)
    params = SamplingParams(temperature=0, ignore_eos=True, confidence=1.0, max_tokens=1)
    core.add(SubmitRequest("prompt", drawn, params, time.monotonic()))
    return clocked.prefill(tokens)


def one(clocked: ClockedCore, rates: Rates, step: Steps) -> dict[str, Any]:
    """A step's figures, in milliseconds and shares. Raises ValueError without the kernels, which alone are clocked."""
    bounds = clocked.bounds(step, rates)
    if bounds is None:
        raise ValueError("the model does not run on the CPU kernels, so its parts cannot be told apart.")
    parts = dict(zip(PARTS, step.parts, strict=True))
    return {
        "tokens": step.rows,
        "ms": 1000 * step.seconds,
        "tokens_per_second": step.rows / step.seconds,
        "parts_ms": {part: 1000 * seconds for part, seconds in parts.items()},
        "of_roofline": {part: bound / parts[part] for part, bound in bounds.items()},
        "of_rate": rates.seconds(0.0, **clocked.linear_products(step.rows)) / step.seconds,
        "of_all": sum(bounds.values()) / step.seconds,
    }


def median_of(own: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure by itself."""
    return {
        name: (
            median_of([row[name] for row in own])
            if isinstance(value, dict)
            else statistics.median(row[name] for row in own)
        )
        for name, value in own[0].items()
    }


def table(rows: list[dict[str, Any]]) -> str:
    shown = [part for part in PARTS if part != "micro-steps"]
    lines = [f"| tokens | ms | tokens/s | {' | '.join(shown)} | of the rate | of the roofline |"]
    lines.append("|" + " ---: |" * (len(shown) + 5))
    for row in rows:
        cells = [
            f"{row['parts_ms'][part]:.1f}" + (f" ({of:.2f})" if (of := row["of_roofline"].get(part)) else "")
            for part in shown
        ]
        lines.append(
            f"| {row['tokens']:.0f} | {row['ms']:.1f} | {row['tokens_per_second']:.0f} | {' | '.join(cells)} "
            f"| {row['of_rate']:.2f} | {row['of_all']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
