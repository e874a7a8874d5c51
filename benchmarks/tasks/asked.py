"""The tasks, from folders of public data sets (JSON Lines, also .gz), and how each one's answer is scored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hamburger.training.corpus.jsonl import read_rows
from tasks.following import share_followed

Score = Callable[[str], float | None]
_STEPS = "Think step by step and write down every step. End with a line that reads: The answer is NUMBER."


@dataclass(frozen=True, slots=True)
class Task:
    """turns: what the user says; all but the last are answered first. score: of the last answer, in 0..1; None where
    it says nothing. temperature: of the answers."""

    kind: str
    turns: list[str]
    score: Score
    temperature: float = 0.7


def read_tasks(folder: Path, per_kind: int) -> list[Task]:
    """The first `per_kind` of each kind. folder: holds eval/ and prompts/ as the data's README describes them. Raises
    OSError or TrainingError where a file is missing or none of this kind."""
    makers: list[tuple[str, Callable[[dict[str, Any]], Task | None]]] = [
        ("eval/gsm8k_test.jsonl.gz", _gsm8k),
        ("eval/ifeval.jsonl.gz", _ifeval),
        ("eval/spec_bench.jsonl.gz", _summary),
        ("prompts/context_qa_stories.jsonl.gz", _story),
        ("eval/mt_bench.jsonl", _second_turn),
    ]
    found: list[Task] = []
    for name, maker in makers:
        tasks = _made(folder / name, maker)
        found += [task for task, _ in zip(tasks, range(per_kind), strict=False)]
    return found


def _made(file: Path, maker: Callable[[dict[str, Any]], Task | None]) -> Iterator[Task]:
    for row in read_rows(file):
        if (task := maker(row.values)) is not None:
            yield task


def _gsm8k(row: dict[str, Any]) -> Task:
    wanted = float(str(row["final"]).replace(",", ""))

    def score(answer: str) -> float:
        told = re.findall(r"answer is[^\d-]*(-?[\d,]*\.?\d+)", answer) or re.findall(r"-?[\d,]*\.?\d+", answer)
        return float(bool(told) and float(told[-1].replace(",", "") or "nan") == wanted)

    return Task("gsm8k", [f"{row['question']}\n\n{_STEPS}"], score, temperature=0.0)


def _ifeval(row: dict[str, Any]) -> Task | None:
    instructions, fields = row["instruction_id_list"], row["kwargs"]

    def score(answer: str) -> float | None:
        return share_followed(answer, instructions, fields)

    return None if score("") is None else Task("ifeval", [row["prompt"]], score)


def _summary(row: dict[str, Any]) -> Task | None:
    if row["category"] != "summarization" or not row["reference"]:
        return None
    reference = row["reference"][0]
    ask = f"{row['turns'][0]}\n\nWrite a detailed summary of several paragraphs."
    return Task("summary", [ask], lambda answer: rouge_l(answer, reference))


def _story(row: dict[str, Any]) -> Task | None:
    if row["category"] != "story_continuation":
        return None
    return Task("story", [f"{row['prompt']}\n\nWrite at least 600 words."], lambda answer: None)


def _second_turn(row: dict[str, Any]) -> Task | None:
    return Task("second turn", row["turns"], lambda answer: None) if len(row["turns"]) == 2 else None


def rouge_l(answer: str, reference: str) -> float:
    """The F1 of the longest common subsequence of words (Lin 2004)."""
    ours, theirs = (re.findall(r"\w+", text.lower()) for text in (answer, reference))
    if not ours or not theirs:
        return 0.0
    row = [0] * (len(theirs) + 1)
    for word in ours:
        before, row = row, [0]
        for i, other in enumerate(theirs):
            row.append(before[i] + 1 if word == other else max(before[i + 1], row[i]))
    return 2 * row[-1] / (len(ours) + len(theirs))
