"""Answers of servers on disk: one JSON line each, so that an evaluation that was stopped goes on where it was.

An answer is found again by what was asked (server, model, confidence, text), never by its place in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

from hamburger.clients.evaluation.errors import EvalError
from hamburger.clients.json_lines import GrowingFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answered to one item: a text, or the log-likelihood of each choice.

    sent: seconds since the epoch; seconds: from sending to the end of the answer. Counts are None where the server
    does not say.
    """

    key: str
    task: str
    id: str
    url: str
    model: str
    confidence: float | None
    text: str | None = None
    loglikelihoods: list[float] | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    kv_slots: int | None = None
    sent: float = 0.0
    seconds: float = 0.0

    @property
    def content(self) -> str | list[float]:
        """The text, or the log-likelihoods. Raises EvalError for an answer without either."""
        content = self.loglikelihoods if self.text is None else self.text
        if content is None:
            raise EvalError(f"the stored answer to {self.id!r} has neither text nor loglikelihoods: delete its line.")
        return content


def question_key(asked: dict[str, Any]) -> str:
    """The name of what was asked; equal for equal questions."""
    return sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


class AnswerStore:
    """The answers in --answers, a JSON Lines file; new ones are written as they come.

    A context manager: it closes the file, and leaves none where there was none and no answer came.
    """

    def __init__(self, path: Path) -> None:
        """Read what is there. A last line that was cut off is dropped.

        Raises OSError that names the option, or EvalError with the line.
        """
        names = {field.name for field in fields(Answer)}

        def parse(number: int, line: bytes) -> Answer:
            try:
                row = json.loads(line)
                return Answer(**{name: value for name, value in row.items() if name in names})
            except (ValueError, TypeError, AttributeError):
                raise EvalError(
                    f"{path}, line {number} is no answer: delete that line, or name another file with --answers."
                ) from None

        self._file = GrowingFile("--answers", path, parse)
        self._answers = {answer.key: answer for answer in self._file.rows}

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.__exit__(kind, error, tb)

    def get(self, key: str) -> Answer | None:
        return self._answers.get(key)

    def add(self, answer: Answer) -> None:
        """Keep it, on disk at once."""
        self._answers[answer.key] = answer
        self._file.add(asdict(answer))


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over answers; None where any answer's server did not say. busy_seconds: at least one was in flight."""

    completion_tokens: int | None
    kv_slots: int | None
    busy_seconds: float
    cut: int  # answers that the token limit ended

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Usage:
        listed = list(answers)
        return cls(
            _sum([answer.completion_tokens for answer in listed]),
            _sum([answer.kv_slots for answer in listed]),
            busy_seconds((answer.sent, answer.sent + answer.seconds) for answer in listed),
            sum(answer.finish_reason == "length" for answer in listed),
        )

    @property
    def tokens_per_kv(self) -> float | None:
        return self.completion_tokens / self.kv_slots if self.completion_tokens and self.kv_slots else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of all answers in flight together."""
        return self.completion_tokens / self.busy_seconds if self.completion_tokens and self.busy_seconds else None


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) intervals: pauses between two runs do not count."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
