"""What LLM is given: prompts, conversations and what goes with each, in all their forms, checked. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from operator import index
from typing import Any, TypeVar

from hamburger.engine.text.message_text import one_text
from hamburger.engine.types.errors import HamburgerError, InvalidRequest, shown
from hamburger.engine.types.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

_PROMPT = 'a text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'
_CHAT = 'a list of {"role": ..., "content": ...}'
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. Raises InvalidRequest for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    held = _listed("prompts", "a text or a list of prompts", prompts)
    return [held] if held and isinstance(held[0], Integral) else held


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """What one prompt says. Raises InvalidRequest for what is none."""
    if isinstance(prompt, Mapping):
        given = [name for name, value in prompt.items() if value is not None]
        if given not in (["prompt"], ["prompt_token_ids"]):
            raise InvalidRequest(f"A prompt must be {_PROMPT}, and nothing beside it, not {shown(prompt)}.", "prompts")
        prompt = prompt[given[0]]
    if isinstance(prompt, str):
        return prompt
    try:
        if isinstance(prompt, bytes | bytearray | Mapping):  # a text that was read as bytes is no ids
            raise TypeError
        return [index(token_id) for token_id in prompt]
    except TypeError:
        raise InvalidRequest(f"A prompt must be {_PROMPT}, not {shown(prompt)}.", "prompts") from None


def listed_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several, as several. Raises InvalidRequest for what is neither."""
    chats = _listed("messages", _CHAT, messages)
    return [chats] if chats and isinstance(chats[0], Mapping) else chats


def chat_turns(chat: Sequence[Message]) -> list[dict[str, Any]]:
    """One conversation as the chat template reads it. Raises InvalidRequest for what is none."""
    turns = []
    for turn in _listed("messages", _CHAT, chat):
        if not isinstance(turn, Mapping):
            raise InvalidRequest(f"messages must be {_CHAT}, not hold {shown(turn)}.", "messages")
        try:
            turns.append({**turn, "content": one_text(turn["content"])} if "content" in turn else {**turn})
        except ValueError as error:
            raise InvalidRequest(f"messages hold a content of another kind: {error}.", "messages") from None
    if not turns:
        raise InvalidRequest("The conversation is empty: it needs at least one message.", "messages")
    return turns


def params_of_each(params: SamplingParams | Sequence[SamplingParams], number: int) -> list[SamplingParams]:
    """One for each of `number` prompts, not checked. Raises ValueError where there are others."""
    if isinstance(params, SamplingParams):
        return [params] * number
    held = _listed("sampling_params", "SamplingParams, or a list with one a prompt", params)
    if len(held) != number:
        raise ValueError(f"{number} prompts came with {len(held)} sampling params.")
    return held


def check_params(params: SamplingParams) -> None:
    """Raise InvalidRequest for what is none."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling_params holds {shown(params)}: use SamplingParams.", "sampling_params")


def priority_of_each(priority: int | Sequence[int] | None, number: int) -> list[int]:
    """One for each of `number` prompts; None is 0. Raises ValueError where there are others, InvalidRequest for what is
    no number."""
    wanted = "a whole number, or a list with one a prompt"
    if priority is None or isinstance(priority, Integral):
        return [int(priority or 0)] * number
    held = _listed("priority", wanted, priority)
    if len(held) != number:
        raise ValueError(f"{number} prompts came with {len(held)} priorities.")
    for one in held:
        if not isinstance(one, Integral):
            raise InvalidRequest(f"priority holds {shown(one)}: it must be {wanted}.", "priority")
    return [int(one) for one in held]


def each(do: Callable[[int, _In], _Out], prompts: Iterable[_In]) -> Iterator[_Out]:
    """What `do` makes of each prompt's number and the prompt; its errors say which one they are about."""
    for number, prompt in enumerate(prompts):
        try:
            yield do(number, prompt)
        except HamburgerError as error:
            raise about(error, number) from None


def about(error: HamburgerError, number: int) -> HamburgerError:
    """The error, with a note that says which prompt it is about."""
    error.add_note(f"This is about prompt number {number}, counted from 0.")
    return error


def _listed(name: str, wanted: str, value: Any) -> list[Any]:
    """What is given as a list. Raises InvalidRequest for anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be {wanted}, not {shown(value)}.", name)
    return list(value)
