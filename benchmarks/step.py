"""What decoding costs in one engine: a macro-step of the HAMburger at several confidences, beside the plain base.

    python benchmarks/step.py --out docs/results/step.json

Both models lie in this process and answer the same prompts, others in each round, with nothing between the clock and
the core: no HTTP, no messages, no text. Every measurement is of `--steps` macro-steps of full batches that only decode;
all take turns, and who begins changes from round to round. Reported, medians over rounds: milliseconds a macro-step and
where they go, tokens per KV (g), tokens/s; the cost r of a micro-step over a base step, the merge of its token into the
next slot included, from steps at confidence 0, where every group is full, against those at 1; and each confidence's
speed over the base's beside what g and r allow, g / (1 + (g - 1) r).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch

from hamburger.clients.prompts import built_in_prompts
from hamburger.engine.build import build_core
from hamburger.engine.core.core import EngineCore
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import AbortRequest, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import resolve_source
from machine import processor

BASE = "base"
PARTS = ("embedding and merge", "layers", "heads and micro-steps", "the rest")  # scheduler, tensors, results
PROMPT_WORDS = 40
MOST_TOKENS = 4000  # never reached: answers are cut after so many steps


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of one contestant in one round: seconds of all and of each of PARTS, and the tokens that they emitted."""

    streams: int
    round: int
    name: str
    steps: int
    seconds: float
    tokens: int
    parts: tuple[float, ...] = (0.0,) * len(PARTS)

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_kv(self) -> float:
        return self.tokens / (self.steps * self.streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the HAMburger (default: the embedded one)")
    parser.add_argument("--base", default="builtin", help="the plain base under it")
    parser.add_argument("--streams", type=_integers, default=[1, 4, 16], help="of a batch, with commas")
    parser.add_argument("--confidences", type=_fractions, default=[0.8, 0.7, 0.5, 0.3], help="besides 0 and 1")
    parser.add_argument("--steps", type=int, default=48, help="macro-steps of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    args = parser.parse_args()
    cores = {name: _clocked(args, name) for name in (BASE, "hamburger")}
    names = [BASE, *(f"{c:g}" for c in [1.0, *args.confidences, 0.0])]
    found = []
    for streams in args.streams:
        for round_ in range(args.rounds + 1):
            turn = round_ % len(names)
            for name in names[turn:] + names[:turn]:
                measured = _measure(cores[BASE if name == BASE else "hamburger"], name, streams, round_, args.steps)
                if round_ > 0:  # the first warms up
                    found.append(measured)
    rows = [row for streams in args.streams for row in report([m for m in found if m.streams == streams])]
    print(table(rows))
    if args.out:
        told = {"date": datetime.now(UTC).date().isoformat(), "processor": processor(), "torch": torch.__version__}
        settings = {"threads": torch.get_num_threads(), "steps": args.steps, "rounds": args.rounds}
        measured_ = [asdict(m) for m in found]
        value = {**told, **settings, "quantization": args.quantization, "rows": rows, "measured": measured_}
        args.out.write_text(json.dumps(value) + "\n")


class Clocked:
    """A core whose model's parts are clocked, and prompts for it."""

    def __init__(self, core: EngineCore, prompts: list[list[int]]) -> None:
        self.core, self.prompts = core, prompts
        self._seconds = dict.fromkeys(("model", "embed", "trunk"), 0.0)
        steps = cast(Any, core._runner)._steps  # whose methods are replaced
        steps.step_with = self._clocked("model", steps.step_with)
        backend = steps.backend
        backend.embed = self._clocked("embed", backend.embed)
        backend.trunk = self._clocked("trunk", backend.trunk)

    def steps(self, number: int) -> tuple[float, int, tuple[float, ...]]:
        """Seconds, tokens, and seconds of PARTS."""
        self._seconds.update(dict.fromkeys(self._seconds, 0.0))
        start, tokens = time.perf_counter(), 0
        for _ in range(number):
            tokens += sum(len(output.token_ids) for output in self.core.step().outputs)
        seconds, of = time.perf_counter() - start, self._seconds
        # The backend's trunk embeds its slots itself.
        trunk, emit = of["trunk"] - of["embed"], of["model"] - of["trunk"]
        return seconds, tokens, (of["embed"], trunk, emit, seconds - of["model"])

    def _clocked(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[part] += time.perf_counter() - start

        return call


def report(found: list[Measured]) -> list[dict[str, Any]]:
    """Rows of one number of streams, in the order in which contestants were first measured. Ratios are taken within a
    round; `of_target` is the speed over the base's over what g and the micro-step's cost allow."""
    by_round = {(m.round, m.name): m for m in found}
    rounds = sorted({m.round for m in found})

    def micro_step(round_: int) -> float:
        base, full, single = (by_round[round_, name] for name in (BASE, "0", "1"))
        added = full.tokens_per_kv - single.tokens_per_kv
        return (full.step_seconds - single.step_seconds) / added / base.step_seconds

    cost = statistics.median(micro_step(round_) for round_ in rounds)
    rows = []
    for name in dict.fromkeys(m.name for m in found):
        own = [m for m in found if m.name == name]
        g = statistics.median(m.tokens_per_kv for m in own)
        speeds = [(by_round[r, name].tokens_per_second, by_round[r, BASE].tokens_per_second) for r in rounds]
        over_base = sorted(ours / base for ours, base in speeds)
        rows.append(
            {
                "streams": own[0].streams,
                "name": name,
                "parts_ms": [1000 * statistics.median(m.parts[i] / m.steps for m in own) for i in range(len(PARTS))],
                "ms": 1000 * statistics.median(m.step_seconds for m in own),
                "tokens_per_kv": g,
                "tokens_per_second": statistics.median(m.tokens_per_second for m in own),
                "over_base": [statistics.median(over_base), over_base[0], over_base[-1]],
                "micro_step_over_base_step": cost,
                "of_target": statistics.median(over_base) / (g / (1 + (g - 1) * cost)),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["streams", "confidence", "ms a macro-step", *PARTS, "g", "tok/s", "over base (range)"]
    heads += ["of g / (1 + (g - 1) r)", "r"]
    lines = [f"| {' | '.join(heads)} |", "| ---: | --- |" + " ---: |" * (len(heads) - 2)]
    for row in rows:
        middle, low, high = row["over_base"]
        lines.append(
            f"| {row['streams']} | {row['name']} | {row['ms']:.2f} "
            f"| {' | '.join(f'{ms:.2f}' for ms in row['parts_ms'])} | {row['tokens_per_kv']:.2f} "
            f"| {row['tokens_per_second']:.0f} | {middle:.2f} ({low:.2f} to {high:.2f}) | {row['of_target']:.2f} "
            f"| {row['micro_step_over_base_step']:.3f} |"
        )
    return "\n".join(lines)


def _clocked(args: argparse.Namespace, name: str) -> Clocked:
    """With prompts for the largest batch; every round begins one further."""
    model, base = (args.base, None) if name == BASE else (args.model, None if args.model is None else args.base)
    most = max(args.streams)
    core, _ = build_core(
        EngineArgs(model=model, base=base, quantization=args.quantization, max_num_seqs=most, prefix_cache=False)
    )
    tokenizer = Tokenizer.load(resolve_source(model, base).tokenizer_path)
    chats = [[{"role": "user", "content": text}] for text in built_in_prompts(most + args.rounds, PROMPT_WORDS, seed=0)]
    return Clocked(core, [tokenizer.encode(tokenizer.apply_chat_template(chat)) for chat in chats])


def _measure(of: Clocked, name: str, streams: int, round_: int, steps: int) -> Measured:
    core = of.core
    confidence = 1.0 if name == BASE else float(name)
    params = SamplingParams(temperature=0, ignore_eos=True, confidence=confidence, max_tokens=MOST_TOKENS)
    waiting = set()
    for index, prompt in enumerate(of.prompts[round_ : round_ + streams]):
        waiting.add(str(index))
        core.add(SubmitRequest(str(index), prompt, params, time.monotonic()))
    while waiting:
        waiting -= {output.request_id for output in core.step().outputs}
    measured = of.steps(steps)
    for index in range(streams):
        core.abort(AbortRequest(str(index)))
    return Measured(streams, round_, name, steps, *measured)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _fractions(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
