"""A conversation -> token ids, and which of them are trained, turn by turn with the model's own chat template.

Trained are the assistant's tokens up to and with the end token: what the model itself has to write. A newline that the
template puts after the end token is never generated, so it is never trained. No tensors, no files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hamburger.training.corpus.prompts import Message
from hamburger.training.errors import TrainingError

TrainOn = Literal["last", "all"]


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer; engine.text.tokenizer.Tokenizer has it."""

    @property
    def eos_token_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """token_ids and, for each, whether it is trained. The first token never is."""

    token_ids: list[int]
    response: list[bool]

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response)


def prompt_ids(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[int]:
    """The ids that the model answers when it is asked `messages`: as the server makes them."""
    return tokenizer.encode(tokenizer.apply_chat_template([dict(m) for m in messages]))


def answer_ids(
    tokenizer: ChatTokenizer, response: str, *, is_finished: bool, end_token_ids: Collection[int]
) -> list[int]:
    """The ids of an answer of which only the text is known; is_finished: the model ended it, so with the end token."""
    ids = tokenizer.encode(response)
    return [*ids, end_token_id(tokenizer, end_token_ids)] if is_finished else ids


def end_token_id(tokenizer: ChatTokenizer, end_token_ids: Collection[int]) -> int:
    """The one of the model's end tokens that ends a turn. Raises TrainingError when the model has none."""
    if tokenizer.eos_token_id is not None and (tokenizer.eos_token_id in end_token_ids or not end_token_ids):
        return tokenizer.eos_token_id
    if not end_token_ids:
        raise TrainingError("the model names no end token: set eos_token_id in its config.json.")
    return min(end_token_ids)


def tokenize_conversation(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    end_token_ids: Collection[int],
    answer: Sequence[int] | None = None,
    prompt: Sequence[int] | None = None,
    train_on: TrainOn = "last",
) -> TokenizedConversation:
    """Tokenize a conversation.

    messages: its turns. Without `answer` the last one is the assistant's, and is the answer; with it, the turns before.
    answer: the ids that the model wrote, with the end token if it wrote one. prompt: the ids that it was asked.
    train_on: "last" trains the last answer; "all" every turn of the assistant.

    Raises TrainingError when nothing is left to train, when the template writes no end token after an answer, or when
    it rewrites earlier turns as a conversation grows (then only "last" with `answer` can be trained).
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if answer is None and (not turns or turns[-1] != len(messages) - 1):
        raise TrainingError("the last message must be the assistant's: there is no answer to train.")
    trained = turns if train_on == "all" else turns[-1:] if answer is None else []
    if answer is not None and not answer:
        raise TrainingError("the answer has no token.")
    so_far = _Growing(tokenizer)
    for turn in trained:
        so_far.prompt(messages[:turn])
        so_far.answer(messages[: turn + 1], end_token_ids)
    if answer is not None:
        if prompt is not None and not trained:
            so_far.ids, so_far.response = [*prompt], [False] * len(prompt)
        else:
            so_far.prompt(messages)
        so_far.extend(answer, True)
    if so_far.response[:1] != [False]:
        raise TrainingError("the conversation has no prompt: the chat template writes nothing before the answer.")
    return TokenizedConversation(so_far.ids, so_far.response)


class _Growing:
    """The text rendered so far, its ids, and which of them are trained."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self.ids: list[int] = []
        self.response: list[bool] = []

    def extend(self, ids: Sequence[int], is_trained: bool) -> None:
        self.ids += ids
        self.response += [is_trained] * len(ids)

    def prompt(self, messages: Sequence[Message]) -> None:
        """Grow up to the opening of the assistant's next turn."""
        self.extend(self._grow(messages, add_generation_prompt=True), False)

    def answer(self, messages: Sequence[Message], end_token_ids: Collection[int]) -> None:
        """Grow by the assistant's turn that ends `messages`."""
        ids = self._grow(messages, add_generation_prompt=False)
        ends = [i for i, token_id in enumerate(ids) if token_id in end_token_ids]
        if not ends:
            raise TrainingError(
                "the chat template writes no end token of the model after an answer "
                f"({', '.join(map(str, sorted(end_token_ids)))}), so none would be learnt: mend one of the two."
            )
        self.extend(ids[: ends[-1] + 1], True)
        self.extend(ids[ends[-1] + 1 :], False)  # such as a newline

    def _grow(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """The ids of what the template writes after the text so far."""
        text = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=add_generation_prompt
        )
        if not text.startswith(self.text):
            raise TrainingError(
                f"the chat template rewrites earlier turns when message {len(messages) - 1} is added, so what was "
                "trained there would never be seen: train on the last answer only, or split the conversation."
            )
        whole = self.tokenizer.encode(text)
        # Encoding the whole is what the server does; where a token spans the border, the border wins, as in generation.
        known = len(self.ids)
        ids = whole[known:] if whole[:known] == self.ids else self.tokenizer.encode(text[len(self.text) :])
        self.text = text
        return ids
