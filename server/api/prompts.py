"""From what a client wrote to prompt token ids. The tokenizer's refusals become errors that name the client's field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from hamburger.engine.types.errors import InvalidRequest, PromptTooLong, TokenizerError
from hamburger.server.api.message import Message
from hamburger.server.server_tokenizer import ServerTokenizer
from hamburger.server.tools.tool_use import messages_with_tools, results_as_user

T = TypeVar("T")
_RESERVED = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}
_LONG_TEXT = 20_000  # characters: a few ms of tokenizing, which other streams need not wait for
_MANY_MESSAGES = 200  # the same of the template


async def encode_text(
    tokenizer: ServerTokenizer,
    text: str,
    *,
    add_special_tokens: bool,
    param: str,
    max_tokens: int | None = None,
    noun: str = "prompt",
) -> list[int]:
    """Raises InvalidRequest that names `param`. A text that cannot have as few as `max_tokens` tokens is PromptTooLong
    before it is tokenized."""
    if max_tokens is not None and len(text) > (most := max_tokens * tokenizer.max_token_bytes):
        raise PromptTooLong(
            f"The {noun} has {len(text)} characters, but the context holds {max_tokens} tokens, which cover at most "
            f"{most}: shorten it.",
            param,
        )

    def encode() -> list[int]:
        return _naming_field(param, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    return encode() if len(text) < _LONG_TEXT else await asyncio.to_thread(encode)


async def encode_chat(
    tokenizer: ServerTokenizer,
    messages: list[Message],
    *,
    add_generation_prompt: bool | None,
    add_special_tokens: bool = False,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """The prompt that the model's chat template makes of `messages`. Raises InvalidRequest that names the field.

    Where the template knows nothing of tools, they are described in the system message.
    """
    written = [message.for_template() for message in messages]
    knows_tools = "tools" in (tokenizer.tool_template or "")
    kwargs = dict(template_kwargs or {})
    if reserved := kwargs.keys() & _RESERVED:
        raise InvalidRequest(f"chat_template_kwargs sets {', '.join(sorted(reserved))}.", "chat_template_kwargs")
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
        )
    # To continue a message is to ask for no new one.
    adds_generation_prompt = not continue_final_message if add_generation_prompt is None else add_generation_prompt

    def render(chat: list[dict[str, Any]]) -> str:
        if not knows_tools:
            chat = messages_with_tools(chat, tools or [])
        return tokenizer.apply_chat_template(
            chat,
            add_generation_prompt=adds_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools if knows_tools else None,
            **kwargs,
        )

    def render_all() -> str:
        """Some templates refuse the role `tool`, or leave it out: the model must see what its calls gave."""
        results = [message["content"] for message in written if message["role"] == "tool"]
        try:
            text = render(written)
        except TokenizerError:
            if not results or knows_tools:
                raise
        else:
            if knows_tools or all(result.strip() in text for result in results):
                return text
        return render(results_as_user(written))

    num_characters = sum(len(message.get("content") or "") for message in written)
    is_long = len(written) > _MANY_MESSAGES or num_characters >= _LONG_TEXT or bool(tools or template_kwargs)
    work = partial(_naming_field, "messages", render_all)
    text = await asyncio.to_thread(work) if is_long else work()
    return await encode_text(
        tokenizer, text, add_special_tokens=add_special_tokens, param="messages", max_tokens=max_tokens
    )


def _naming_field(param: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except TokenizerError as error:
        raise InvalidRequest(str(error), param) from error
