"""From what a client wrote to prompt token ids. The tokenizer's refusals become errors that name the client's field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from hamburger.engine.errors import InvalidRequest, TokenizerError
from hamburger.server.context import ServerTokenizer
from hamburger.server.protocol import Message

T = TypeVar("T")
_LONG_TEXT = 20_000  # characters: a few ms of tokenizing, which other streams need not wait for


async def encode_text(tokenizer: ServerTokenizer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    """Raises InvalidRequest that names `param`."""

    def encode() -> list[int]:
        return _naming(param, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    return encode() if len(text) < _LONG_TEXT else await asyncio.to_thread(encode)


async def encode_chat(
    tokenizer: ServerTokenizer,
    messages: list[Message],
    *,
    add_generation_prompt: bool | None,
    add_special_tokens: bool = False,
) -> list[int]:
    """The prompt that the model's chat template makes of `messages`. Raises InvalidRequest that names messages."""
    written = [message.for_template() for message in messages]
    ask = add_generation_prompt is not False
    text = _naming("messages", lambda: tokenizer.apply_chat_template(written, add_generation_prompt=ask))
    return await encode_text(tokenizer, text, add_special_tokens=add_special_tokens, param="messages")


def _naming(param: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except TokenizerError as error:
        raise InvalidRequest(str(error), param) from error
