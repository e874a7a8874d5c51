"""Answers files: what `distill` writes, and what others wrote in nearly the same form, read as one kind of record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

from hamburger.training.corpus.conversation import (
    ChatTokenizer,
    TokenizedConversation,
    TrainOn,
    answer_ids,
    tokenize_conversation,
)
from hamburger.training.corpus.jsonl import ids_of, read_rows, text_of
from hamburger.training.corpus.prompts import Message, row_category, row_id, row_messages
from hamburger.training.errors import TrainingError

Finish = Literal["stop", "length"]
_LOOKED_AT = 8  # rows of a file, by which another model's shows


class Decoder(Protocol):
    """What turns ids into text; engine.text.tokenizer.Tokenizer does."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """One answer to train on.

    messages: the turns before it. response: its text. token_ids: its ids with the end token where the model wrote one;
    None where only the text is known, as prompt_ids where the ids asked are not known. sample: which of several answers
    to the same prompt. place: file and line, for messages.
    """

    id: str
    sample: int
    category: str | None
    messages: list[Message]
    response: str
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    finish_reason: Finish
    place: str

    def tokenize(
        self, tokenizer: ChatTokenizer, end_token_ids: Collection[int], train_on: TrainOn = "last"
    ) -> TokenizedConversation:
        """Ids and response mask. Raises TrainingError that names the place."""
        try:
            answer = self.token_ids
            if answer is None:
                answer = answer_ids(
                    tokenizer,
                    self.response,
                    is_finished=self.finish_reason == "stop",
                    end_token_ids=end_token_ids,
                )
            return tokenize_conversation(
                tokenizer,
                self.messages,
                end_token_ids=end_token_ids,
                answer=answer,
                prompt=self.prompt_ids,
                train_on=train_on,
            )
        except TrainingError as error:
            raise TrainingError(f"{self.place}: {error}") from error


def read_answers(paths: Iterable[Path]) -> Iterator[WrittenAnswer]:
    """The answers of JSON Lines files, in order.

    Rows hold "messages" (the turns before the answer) or "prompt", then "response", and if known "token_ids",
    "prompt_ids" and "finish_reason" ("stop" where it is missing). A row with "messages" alone that end with the
    assistant's turn is a conversation with its answer. Raises TrainingError that names file and line, or OSError.
    """
    for path in paths:
        for row in read_rows(path):
            messages = row_messages(row)
            if row.values.get("response") is None and messages[-1]["role"] == "assistant":
                response = messages.pop()["content"]
                if not messages:
                    raise TrainingError(f"{row.place}: the conversation begins with the answer.")
            else:
                response = text_of(row, "response")
            finish = row.values.get("finish_reason", "stop")
            if finish not in ("stop", "length"):
                raise TrainingError(f'{row.place}: "finish_reason" must be "stop" or "length", not {finish!r}.')
            sample = row.values.get("sample", 0)
            if type(sample) is not int or sample < 0:
                raise TrainingError(f'{row.place}: "sample" must be a whole number from 0 up, not {sample!r}.')
            yield WrittenAnswer(
                id=row_id(row),
                sample=sample,
                category=row_category(row),
                messages=messages,
                response=response,
                prompt_ids=ids_of(row, "prompt_ids"),
                token_ids=ids_of(row, "token_ids"),
                finish_reason=finish,
                place=row.place,
            )


def check_written_with(tokenizer: Decoder, paths: Iterable[Path]) -> None:
    """Whether the answers' ids mean to the model what they meant to the one that wrote them: the first rows of each
    file tell, where they have text and ids. Raises TrainingError that names file and line, or OSError."""
    for path in paths:
        with_both = (answer for answer in read_answers([path]) if answer.response and answer.token_ids)
        for answer in islice(with_both, _LOOKED_AT):
            ids = answer.token_ids or []
            # Some write end tokens out, or cut the text where a character or the answer has no end.
            texts = {_bare(tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (True, False)}
            if _bare(answer.response) not in texts:
                raise TrainingError(
                    f'{answer.place}: token_ids are not those of "response" to this model: name the model that wrote '
                    "the answers with --model, or leave token_ids and prompt_ids out of the rows."
                )


def _bare(text: str) -> str:
    return text.strip().rstrip("\ufffd").rstrip()
