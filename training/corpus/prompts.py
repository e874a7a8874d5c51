"""Prompt files, and the split that keeps some prompts out of training for ever. It knows no tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hamburger.training.corpus.jsonl import Row, read_rows, text_of, whole_text
from hamburger.training.errors import TrainingError

HELD_OUT = 0.04

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation whose next turn is the assistant's. messages: role and content of each turn."""

    id: str
    messages: list[Message]
    category: str | None


def is_held_out(id: str, fraction: float = HELD_OUT) -> bool:
    """Whether a prompt is for evaluation only. It depends on the id alone, so all commands agree everywhere."""
    return unit_hash(id) < fraction


def is_kept_back(id: str, fraction: float) -> bool:
    """Whether `train` validates with a prompt's answers. By another hash: no held-out prompt is in the data at all."""
    return unit_hash(f"validation {id}") < fraction


def unit_hash(text: str) -> float:
    """A number in [0, 1) that looks random and depends on the text alone."""
    return int(hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8], 16) / 2**32


def read_prompts(paths: Iterable[Path]) -> Iterator[Prompt]:
    """Prompts of JSON Lines files, in order: rows with "prompt" or "messages", and "id" (else it is "line-N").

    Raises TrainingError that names file and line, also when an id comes twice; OSError for a file that cannot be read.
    """
    places: dict[str, str] = {}
    for path in paths:
        for row in read_rows(path):
            prompt = Prompt(row_id(row), row_messages(row), row_category(row))
            if prompt.messages[-1]["role"] == "assistant":
                raise TrainingError(f"{row.place}: the last message is the assistant's, so there is nothing to answer.")
            if prompt.id in places:
                raise TrainingError(
                    f'{row.place}: the id "{prompt.id}" is that of {places[prompt.id]} too: give each row its own "id".'
                )
            places[prompt.id] = row.place
            yield prompt


def row_id(row: Row) -> str:
    """A row's "id" (a whole number is taken as text), else "line-N"."""
    value = row.values.get("id")
    if value is None:
        return f"line-{row.line}"
    if isinstance(value, str) and value:
        return value
    if type(value) is int:
        return str(value)
    raise TrainingError(f'{row.place}: "id" must be a text, not {value!r}.')


def row_category(row: Row) -> str | None:
    value = row.values.get("category")
    return value if isinstance(value, str) else None


def row_messages(row: Row) -> list[Message]:
    """A row's "messages", or its "prompt" as one message of the user; at least one. Raises TrainingError."""
    messages = row.values.get("messages")
    if messages is None:
        if row.values.get("prompt") is None:
            raise TrainingError(f'{row.place} has neither "prompt" nor "messages".')
        return [{"role": "user", "content": text_of(row, "prompt")}]
    if not isinstance(messages, list) or not messages:
        raise TrainingError(f'{row.place}: "messages" must be a list with at least one message.')
    return [_message(row, i, message) for i, message in enumerate(messages)]


def _message(row: Row, index: int, message: object) -> Message:
    if isinstance(message, dict):
        role, content = message.get("role"), message.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {
                "role": whole_text(row, f"message {index}'s role", role),
                "content": whole_text(row, f"message {index}", content),
            }
    raise TrainingError(f'{row.place}: message {index} must have "role" and "content", both texts.')
