"""What verified groups bring on held-out prompts: tokens a macro-step by kind, which drafts are accepted, and whether
every answer is, token for token, that of confidence 1.

    python benchmarks/drafts.py --prompts DATA/*.jsonl.gz --edits 20 --out docs/results/drafts.json
    python benchmarks/drafts.py --prompts DATA/*.jsonl.gz --model builtin --edits 20 --out docs/results/drafts-base.json
    python benchmarks/drafts.py --tables docs/results/drafts*.json > docs/results/drafts.md

One answer at a time, in this process, with nothing between the clock and the core. The prompts are those of
`hamburger eval-quality`; with --edits also Python functions to be written again under another name, without and with
the old code as a prediction (kinds "editing" and "editing, predicted"). Reported by kind and temperature: tokens a
macro-step, drafts and accepted drafts a macro-step, speed over confidence 1 (the two in turns, prompt work left out;
medians over answers); tokens a macro-step and speed once more of each answer before its first repeated 8-gram, since
small models go round in circles, which lookup foresees; by drafter and place the share of drafts that were accepted,
and the expected calibration error of their chances (ten bins).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hamburger.engine.build import build_core
from hamburger.engine.core.core import EngineCore
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import CheckedDrafts, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.training.corpus.jsonl import read_rows
from hamburger.training.corpus.prompts import HELD_OUT, is_held_out, row_id
from hamburger.training.corpus.repetition import first_repeated_ngram
from hamburger.training.quality.prompts import DEFAULT_KINDS, Prompt, choose_prompts
from host.machine import processor


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, and what the client would foretell of the answer."""

    prompt: Prompt
    prediction_ids: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return self.prompt.kind


Groups = Sequence[tuple[int, float]]


@dataclass(slots=True)
class Answer:
    """token_ids of the whole; groups, (tokens, seconds), after its first macro-step, which holds the prompt's work."""

    token_ids: list[int] = field(default_factory=list)
    groups: list[tuple[int, float]] = field(default_factory=list)
    drafts: list[CheckedDrafts] = field(default_factory=list)

    @property
    def uncircular(self) -> list[tuple[int, float]]:
        """The groups before its first repeated 8-gram."""
        end = first_repeated_ngram(self.token_ids)
        done = itertools.accumulate((tokens for tokens, _ in self.groups), initial=len(self.token_ids) - self.tokens)
        next(done)
        return [group for group, last in zip(self.groups, done, strict=True) if end is None or last <= end]

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the HAMburger (default: the embedded one)")
    parser.add_argument("--base", help="its base, where the checkpoint holds only a part")
    parser.add_argument("--tables", type=Path, nargs="+", metavar="FILE", help="print those of earlier calls, no more")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="JSON Lines, also .gz")
    parser.add_argument("--per-kind", type=int, default=40)
    parser.add_argument("--edits", type=int, default=0, metavar="N", help="so many functions to be renamed, too")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-prompt-tokens", type=int, default=768)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    args = parser.parse_args()
    if args.tables:
        print(page(args.tables), end="")
        return
    if not args.prompts:
        parser.error("--prompts: which files of prompts?")
    core, _ = build_core(EngineArgs(model=args.model, base=args.base, groups="verified", prefix_cache=False))
    tokenizer = Tokenizer.load(resolve_source(args.model, args.base).tokenizer_path)

    def encode(messages: Sequence[dict[str, str]]) -> list[int]:
        return tokenizer.encode(tokenizer.apply_chat_template(list(messages)))

    longest = args.max_prompt_tokens
    tasks = [
        Task(prompt) for prompt in choose_prompts(args.prompts, DEFAULT_KINDS, args.per_kind, HELD_OUT, encode, longest)
    ]
    tasks += list(edits(args.prompts, args.edits, encode, lambda text: tokenizer.encode(text)))
    rows, checked = [], []
    for temperature in args.temperatures:
        pairs = [_both(core, task, number, temperature, args.max_tokens) for number, task in enumerate(tasks)]
        rows += report(temperature, tasks, pairs)
        checked += places(temperature, [drafted for _, drafted in pairs])
        print(table([row for row in rows if row["temperature"] == temperature]), flush=True)
    print(table(checked))
    if args.out:
        told = {"date": datetime.now(UTC).date().isoformat(), "processor": processor(), "torch": torch.__version__}
        settings = {"threads": torch.get_num_threads(), "per_kind": args.per_kind, "max_tokens": args.max_tokens}
        settings["model"] = args.model or "the embedded default"
        args.out.write_text(json.dumps({**told, **settings, "rows": rows, "places": checked}, indent=1) + "\n")


def edits(
    files: Sequence[Path],
    number: int,
    encode: Callable[[list[dict[str, str]]], list[int]],
    tokens: Callable[[str], list[int]],
) -> Iterator[Task]:
    """Held-out rows whose response is a Python function, to be written again under another name."""
    found = 0
    for row in (row for file in files for row in read_rows(file)):
        code = str(row.values.get("response"))
        name = re.search(r"^def (\w+)\(", code, re.MULTILINE)
        if found == number or name is None or not is_held_out(row_id(row), HELD_OUT):
            continue
        found += 1
        fenced = f"```python\n{code}\n```"
        ask = f"Rename the function {name[1]} to my_{name[1]}. Answer with the whole code and nothing else.\n\n{fenced}"
        prompt_ids = encode([{"role": "user", "content": ask}])
        yield Task(Prompt(row_id(row), "editing", prompt_ids))
        yield Task(Prompt(row_id(row), "editing, predicted", prompt_ids), tuple(tokens(fenced)))
    if found < number:
        raise SystemExit(f"--edits: only {found} held-out rows have a Python function as their response.")


def report(temperature: float, tasks: Sequence[Task], pairs: Sequence[tuple[Answer, Answer]]) -> list[dict[str, Any]]:
    """A row for each kind, and one for all. pairs: at confidence 1, and with drafts."""
    by_kind = defaultdict(list)
    for task, pair in zip(tasks, pairs, strict=True):
        by_kind[task.kind].append(pair)
        if task.kind in DEFAULT_KINDS:
            by_kind["all"].append(pair)
    found = []
    for kind, answers in sorted(by_kind.items(), key=lambda item: item[0] == "all"):
        drafts = [checked for _, drafted in answers for checked in drafted.drafts]
        steps = sum(len(drafted.groups) for _, drafted in answers)
        whole = [(single.groups, drafted.groups) for single, drafted in answers]
        straight = [(single.uncircular, drafted.uncircular) for single, drafted in answers]
        whole, straight = ([pair for pair in pairs if all(pair)] for pairs in (whole, straight))
        found.append(
            {
                "kind": kind,
                "temperature": temperature,
                "answers": len(answers),
                "same": sum(single.token_ids == drafted.token_ids for single, drafted in answers),
                "tokens_per_step": tokens_per_step(drafted for _, drafted in whole),
                "drafts_per_step": sum(len(checked.token_ids) for checked in drafts) / steps,
                "accepted_per_step": sum(checked.num_accepted for checked in drafts) / steps,
                "speed_over_1": statistics.median(rate(drafted) / rate(single) for single, drafted in whole),
                "straight_tokens_per_step": tokens_per_step(drafted for _, drafted in straight),
                "straight_speed_over_1": statistics.median(rate(drafted) / rate(one) for one, drafted in straight),
            }
        )
    return found


def tokens_per_step(answers: Iterable[Groups]) -> float:
    groups = [group for answer in answers for group in answer]
    return sum(tokens for tokens, _ in groups) / len(groups)


def rate(groups: Groups) -> float:
    """Tokens a second."""
    return sum(tokens for tokens, _ in groups) / sum(seconds for _, seconds in groups)


def places(temperature: float, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Of the drafts whose forerunners were accepted, by drafter and place."""
    outcomes: dict[tuple[str, int], list[tuple[float, bool]]] = defaultdict(list)
    for checked in (checked for answer in answers for checked in answer.drafts):
        for place, chance in enumerate(checked.chances[: checked.num_accepted + 1]):
            outcomes[checked.drafter, place].append((chance, place < checked.num_accepted))
    return [
        {
            "temperature": temperature,
            "drafter": drafter,
            "place": place + 1,
            "drafts": len(seen),
            "accepted": sum(accepted for _, accepted in seen) / len(seen),
            "calibration_error": calibration_error(seen),
        }
        for (drafter, place), seen in sorted(outcomes.items())
    ]


def calibration_error(outcomes: Sequence[tuple[float, bool]]) -> float:
    """The mean distance of foretold and true share over ten bins of equal width, weighed by their numbers."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for outcome in outcomes:
        bins[min(int(outcome[0] * 10), 9)].append(outcome)
    return sum(abs(sum(chance - accepted for chance, accepted in seen)) for seen in bins.values()) / len(outcomes)


HEADS = {
    "kind": "kind", "temperature": "temperature", "answers": "answers", "same": "the same",
    "tokens_per_step": "tokens a pass", "drafts_per_step": "drafts a pass", "accepted_per_step": "accepted",
    "speed_over_1": "speed over 1", "straight_tokens_per_step": "tokens a pass, before circles",
    "straight_speed_over_1": "speed, before circles",
    "drafter": "drafter", "place": "place", "drafts": "drafts", "calibration_error": "calibration error",
    "accepted": "accepted",
}  # fmt: skip


def page(files: Sequence[Path]) -> str:
    """docs/results/drafts.md, from what earlier calls wrote, newest first."""
    parts = ["# Drafts of verified groups\n\nOne answer at" + (__doc__ or "").partition("One answer at")[2].rstrip()]
    runs = [(json.loads(file.read_text()), file) for file in files]
    for found, file in sorted(runs, key=lambda run: (run[0]["date"], run[1].name), reverse=True):
        model = "The plain base" if found["model"] == "builtin" else found["model"][0].upper() + found["model"][1:]
        model += f", {found['date']}, {found['processor']}"
        machine = f"{found['processor']}, {found['threads']} threads, torch {found['torch']}, {found['date']}"
        limits = f"{found['per_kind']} prompts a kind, at most {found['max_tokens']} tokens"
        told = f"Written by benchmarks/drafts.py. {machine}; {limits}. All figures: [{file.name}]({file.name})."
        parts.append("\n\n".join((f"## {model}", told, table(found["rows"]), table(found["places"]))))
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(HEADS[name] for name in rows[0])} |", "| --- " * len(rows[0]) + "|"]
    for row in rows:
        cells = (f"{v:.2f}" if isinstance(v, float) and name != "temperature" else str(v) for name, v in row.items())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(core: EngineCore, task: Task, number: int, temperature: float, most: int) -> tuple[Answer, Answer]:
    """The answer at confidence 1, and with drafts; every other prompt begins with the other."""
    order = (1.0, 0.0) if number % 2 else (0.0, 1.0)
    answers = {confidence: _answer(core, task, number, temperature, most, confidence) for confidence in order}
    return answers[1.0], answers[0.0]


def _answer(core: EngineCore, task: Task, seed: int, temperature: float, most: int, confidence: float) -> Answer:
    params = SamplingParams(
        temperature=temperature, max_tokens=most, seed=seed, confidence=confidence, prediction_ids=task.prediction_ids
    )
    core.add(SubmitRequest("answer", task.prompt.prompt_ids, params, time.monotonic()))
    answer = Answer()
    while core.has_work:
        start = time.perf_counter()
        outputs = core.step().outputs
        seconds = time.perf_counter() - start
        for output in outputs:
            if answer.token_ids:
                answer.groups.append((len(output.token_ids), seconds))
            answer.token_ids += output.token_ids
            if output.drafts is not None:
                answer.drafts.append(output.drafts)
    return answer


if __name__ == "__main__":
    main()
