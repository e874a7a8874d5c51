"""The tasks of `hamburger eval-tasks`: reading their rows, what is asked about each, and how an answer is scored.

Pure but for reading files; knows nothing of servers. Choices are asked and scored as lm_eval's tasks of the same name
do without examples: the context is "Question: ...\\nAnswer:", a choice follows after one space.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from hamburger.clients.evaluation.errors import EvalError
from hamburger.clients.evaluation.ifeval_checks import follows, read_arguments
from hamburger.clients.evaluation.ifeval_text import TextTools
from hamburger.clients.json_lines import check_text, read_rows

GSM8K_PROMPT = '{question}\n\nReason step by step, then write the final number after "####".'
_DIGITS = r"(?:(?<![\w)])-\$?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"  # a minus after a word is an operator
_NUMBER, _MARKED = re.compile(_DIGITS), re.compile(rf"####[\s*:$]*({_DIGITS})")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One prompt of IFEval and its instructions: their ids and arguments."""

    id: str
    prompt: str
    instructions: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of GSM8K: what is asked, and the number that is right."""

    id: str
    prompt: str
    final: Decimal


@dataclass(frozen=True, slots=True)
class Question:
    """One question with choices; `gold` is the index of the right one."""

    id: str
    context: str
    choices: tuple[str, ...]
    gold: int


Item = Instruction | Problem | Question


@dataclass(frozen=True, slots=True)
class Task:
    """metrics: the names of an item's scores. max_tokens: of a written answer; None where choices are compared."""

    name: str
    file: str
    metrics: tuple[str, ...]
    parse: Callable[[Mapping[str, Any], str], Item]
    max_tokens: int | None = None


def read_items(folder: Path, task: Task, limit: int | None = None) -> list[Item]:
    """The rows of a task's file (FILE.jsonl.gz, or FILE.jsonl), the first `limit` of them.

    Raises OSError, or EvalError that names the line and the field.
    """
    path = folder / f"{task.file}.jsonl.gz"
    if not path.exists():
        path = folder / f"{task.file}.jsonl"
    if not path.exists():
        raise EvalError(f"--data {folder} holds no {task.file}.jsonl.gz: put it there, or leave {task.name} out.")
    items: dict[str, Item] = {}
    for number, row in islice(_rows(path), None if limit is None else min(limit, sys.maxsize)):
        try:
            if not isinstance(row, dict):
                raise EvalError("expected a JSON object.")
            check_text("it", json.dumps(row, ensure_ascii=False))
            item = task.parse(row, f"line-{number}")
            if item.id in items:
                raise EvalError(f"id {item.id!r} came before: give each row an id of its own.")
        except ValueError as error:
            raise EvalError(f"{path}, line {number}: {error}") from None
        items[item.id] = item
    if not items:
        raise EvalError(f"{path} holds no rows: each line is one JSON object.")
    return list(items.values())


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from read_rows(path)
    except ValueError as error:
        raise EvalError(str(error)) from None


def score(task: Task, item: Item, answer: str | Sequence[float], tools: TextTools | None) -> dict[str, float]:
    """The item's score for each of the task's metrics, 0 or 1.

    answer: the text that was written, or the log-likelihood of each choice. tools: for IFEval alone.
    """
    match item:
        case Instruction() if isinstance(answer, str) and tools is not None:
            good = all(follows(tools, name, arguments, answer) for name, arguments in item.instructions)
            scores = [good]
        case Problem() if isinstance(answer, str):
            scores = [final_number(answer) == item.final]
        case Question() if not isinstance(answer, str):
            lengths = [len(choice) for choice in item.choices]
            by_length = [value / length for value, length in zip(answer, lengths, strict=True)]
            scores = [_argmax(answer) == item.gold, _argmax(by_length) == item.gold]
        case _:
            raise TypeError(f"{type(item).__name__} cannot be scored by {type(answer).__name__}")
    return dict(zip(task.metrics, map(float, scores), strict=True))


def final_number(text: str) -> Decimal | None:
    """The number that stands right after a "####" (the last such), or else the last number; None without any."""
    text = text.replace("\N{MINUS SIGN}", "-")
    numbers = _MARKED.findall(text) or _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace("$", "").replace(",", ""))


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)  # the first of equals, as numpy.argmax


def _instruction(row: Mapping[str, Any], default_id: str) -> Instruction:
    names, arguments = row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(names, list) or not isinstance(arguments, list) or not names or len(names) != len(arguments):
        raise EvalError("instruction_id_list and kwargs must be lists of one length, at least 1.")
    if not all(isinstance(entry, dict) for entry in arguments):
        raise EvalError("kwargs must hold one JSON object for each instruction.")
    pairs = tuple((str(name), read_arguments(str(name), entry)) for name, entry in zip(names, arguments, strict=True))
    return Instruction(_id(row, default_id), _text(row, "prompt"), pairs)


def _problem(row: Mapping[str, Any], default_id: str) -> Problem:
    final = row.get("final")
    number = final_number(final) if isinstance(final, str) else None
    if number is None:
        raise EvalError(f'final is {final!r}: write the right number as text, like "18".')
    return Problem(_id(row, default_id), GSM8K_PROMPT.format(question=_text(row, "question")), number)


def _question(row: Mapping[str, Any], default_id: str) -> Question:
    choices, gold = row.get("choices"), row.get("gold")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise EvalError("choices must be a list of two texts or more.")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
        raise EvalError(f"gold is {gold!r}: write the index of the right choice, 0 to {len(choices) - 1}.")
    context = _text(row, "query").removesuffix("\n") + "\nAnswer:"
    return Question(_id(row, default_id), context, tuple(choices), gold)


def _id(row: Mapping[str, Any], default: str) -> str:
    return str(row.get("id", default))


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise EvalError(f"{field} is {value!r}: write some text.")
    return value


TASKS = {
    task.name: task
    for task in (
        Task("ifeval", "ifeval", ("prompt_strict",), _instruction, max_tokens=1280),
        Task("gsm8k", "gsm8k_test", ("exact_match",), _problem, max_tokens=512),
        Task("arc_easy", "arc_easy_test", ("acc", "acc_norm"), _question),
        Task("piqa", "piqa_val", ("acc", "acc_norm"), _question),
    )
}
