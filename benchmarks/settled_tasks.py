"""What settled slots change in tasks with long answers: each is answered whole and settled, with the same seed.

    python benchmarks/settled_tasks.py --data FOLDER --out docs/results/settled-tasks.json

Kinds: GSM8K with every step written down (greedy; right or not), IFEval (share of the instructions followed, of those
that tasks/following.py checks), summaries (ROUGE-L against the reference), stories and the second turns of MT-Bench.
Of all: tokens of an answer, tokens a KV slot, how likely the whole model finds it (nats a token), and the share of its
8-grams that are different ones. Each of --settings is compared with the whole, answer by answer, over those answers of
which anything settles, where anything can differ; intervals are of a paired bootstrap.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from hamburger.engine.generation_result import GenerationResult
from hamburger.engine.llm import LLM
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.settle_settings import SETTINGS, settle_settings
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.training.forward.scoring import Scorer
from hamburger.training.statistics import Ratio, difference, resample
from host.machine import processor
from tasks.asked import Task, read_tasks

ROUNDS = 2000
MEASURES = ("score", "nats", "different")


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: its tokens and slots, the task's score (None: none), nats a token and share of different 8-grams."""

    tokens: int
    slots: int
    score: float | None
    nats: float
    different: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets, with eval/ and prompts/")
    parser.add_argument("--model", help="any (default: the embedded one)")
    parser.add_argument("--base", help="its base, where the checkpoint holds only a part")
    parser.add_argument("--per-kind", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument(
        "--settings", type=asked, nargs="+", metavar="W,G,K", help="settle_window, growth and keep (the model's)"
    )
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    args = parser.parse_args()
    tasks = read_tasks(args.data, args.per_kind)
    whole, prompts = answered(args, tasks, None, None)
    rows = []
    fitted = settle_settings(resolve_source(args.model, args.base))
    settings = args.settings or [Settling.of_model(fitted)]
    settled = {settling: answered(args, tasks, settling, prompts)[0] for settling in settings}
    scorer = Scorer.load(args.model, args.base)
    before = judged(scorer, tasks, prompts, whole)
    for settling, results in settled.items():
        rows += compared(settling, tasks, before, judged(scorer, tasks, prompts, results))
    print(table(rows))
    if args.out:
        told = {"date": datetime.now(UTC).date().isoformat(), "processor": processor(), "torch": torch.__version__}
        limits = {"per_kind": args.per_kind, "max_tokens": args.max_tokens}
        args.out.write_text(json.dumps({**told, **limits, "rows": rows}, indent=1) + "\n")


def asked(text: str) -> Settling:
    window, growth, keep = (float(Fraction(part)) for part in text.split(","))
    return Settling(int(window), keep, growth)


def answered(
    args: argparse.Namespace, tasks: Sequence[Task], settling: Settling | None, prompts: list[list[int]] | None
) -> tuple[list[GenerationResult], list[list[int]]]:
    """Every task's last answer, and what was asked. settling: None: whole. prompts: None where first turns
    are to be answered, too: whole ones, so that all settings are asked the same."""
    given: dict[str, Any] = {}
    if settling is not None:
        named = zip(SETTINGS, (settling.window, settling.growth, settling.keep), strict=True)
        given = {"settle": True, **dict(named)}
    llm = LLM(args.model, args.base, groups="verified", **given)

    def params(number: int, task: Task) -> SamplingParams:
        return SamplingParams(temperature=task.temperature, seed=number, max_tokens=args.max_tokens)

    if prompts is None:
        said: list[list[dict[str, str]]] = [[{"role": "user", "content": task.turns[0]}] for task in tasks]
        two = [i for i, task in enumerate(tasks) if len(task.turns) == 2]
        first = llm.chat([said[i] for i in two], [params(i, tasks[i]) for i in two]) if two else []
        for i, result in zip(two, first, strict=True):
            said[i] += [{"role": "assistant", "content": result.text}, {"role": "user", "content": tasks[i].turns[1]}]
        prompts = [llm.tokenizer.encode(llm.tokenizer.apply_chat_template([*turns])) for turns in said]
    return llm.generate(prompts, [params(i, task) for i, task in enumerate(tasks)]), prompts


def judged(
    scorer: Scorer, tasks: Sequence[Task], prompts: list[list[int]], results: Sequence[GenerationResult]
) -> list[Answered]:
    found = []
    for task, prompt, result in zip(tasks, prompts, results, strict=True):
        ids = result.token_ids
        scores = scorer.score([[*prompt, *ids]], [len(prompt)])[0]
        grams = {tuple(ids[i : i + 8]) for i in range(len(ids) - 7)}
        different = len(grams) / (len(ids) - 7) if len(ids) > 7 else 1.0
        nats = -float(scores.logprobs.mean())
        found.append(Answered(len(ids), result.kv_slots, task.score(result.text), nats, different))
    return found


def compared(
    settling: Settling, tasks: Sequence[Task], whole: Sequence[Answered], settled: Sequence[Answered]
) -> list[dict[str, Any]]:
    """A row for each kind, and one for all, over the answers of which either settles."""
    long = [
        (task.kind, a, b)
        for task, a, b in zip(tasks, whole, settled, strict=True)
        if max(a.tokens, b.tokens) > settling.next_place(0, 0)
    ]
    kinds = [*dict.fromkeys(kind for kind, _, _ in long), "all"]
    rows = []
    for kind in kinds:
        pairs = [(a, b) for of, a, b in long if kind in (of, "all")]
        row: dict[str, Any] = {"window": settling.window, "growth": settling.growth, "keep": settling.keep}
        row |= {"kind": kind, "answers": len(pairs)}
        row["tokens"] = [sum(pair[i].tokens for pair in pairs) / len(pairs) for i in (0, 1)]
        row["tokens_per_kv"] = sum(b.tokens for _, b in pairs) / sum(b.slots for _, b in pairs)
        for measure in MEASURES:
            values = [(getattr(a, measure), getattr(b, measure)) for a, b in pairs]
            known = [(x, y) for x, y in values if x is not None and y is not None]
            if not known or (measure == "score" and kind == "all"):  # which are scores of several scales
                row[measure] = None
                continue
            ones = [1.0] * len(known)
            a, b = (Ratio([pair[i] for pair in known], ones) for i in (0, 1))
            apart = difference(b, a, resample(ones, ROUNDS, seed=0))
            row[measure] = {"whole": a.value, "settled": b.value, "low": apart.low, "high": apart.high}
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Differences are of settled answers from whole ones, with the interval of 95 %."""
    head = ("window", "growth", "keep", "kind", "answers", "tokens, whole", "settled", "tokens per KV")
    measured = ("score, whole", "change", "nats, whole", "change", "8-grams, whole", "change")
    lines = [f"| {' | '.join((*head, *measured))} |"]
    lines.append("| --- " * 14 + "|")
    for row in rows:
        cells = [str(row["window"]), f"{row['growth']:.2g}", f"{row['keep']:.3g}", row["kind"], str(row["answers"])]
        cells += [f"{n:.0f}" for n in row["tokens"]]
        cells.append(f"{row['tokens_per_kv']:.2f}")
        for measure in MEASURES:
            found = row[measure]
            if found is None:
                cells += ["", ""]
                continue
            change = found["settled"] - found["whole"]
            cells += [f"{found['whole']:.3f}", f"{change:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
