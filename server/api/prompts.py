"""From what a client wrote to prompt token ids. The tokenizer's refusals become errors that name the client's field."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive

from hamburger.engine.types.errors import InvalidRequest, PromptTooLong, TokenizerError, shown
from hamburger.server.api.model_context import ModelContext
from hamburger.server.bodies.chat import ChatBody, ChatPrompt
from hamburger.server.bodies.message import ROLES, Message
from hamburger.server.server_tokenizer import ServerTokenizer
from hamburger.server.setting_values import RESERVED_VARIABLES
from hamburger.server.tools.tool_messages import messages_with_tools, results_as_user
from hamburger.server.tools.tool_use import ToolUse

T = TypeVar("T")
MAX_BAD_CHARACTERS = 20_000
MAX_TOKENIZED = 1_000_000  # characters of a text that is only counted: many times what contexts hold
_LONG_TEXT = 20_000  # characters: a few ms of tokenizing, which other streams need not wait for
_MANY_MESSAGES = 200  # the same of the template


async def encode_text(
    context: ModelContext,
    receive: Receive,
    text: str,
    *,
    add_special_tokens: bool,
    param: str,
    max_tokens: int | None = None,
    is_cut: bool = False,
    noun: str = "prompt",
) -> list[int]:
    """Raises InvalidRequest that names `param`, or ApiError 499 where the client left. A text that cannot have as few
    as `max_tokens` tokens is PromptTooLong before it is tokenized; one that is cut to them may be longer, not endless.

    receive: of the request, whose body has been read.
    """
    tokenizer = context.tokenizer
    most = None if max_tokens is None else max_tokens * tokenizer.max_token_bytes
    if most is not None and is_cut and len(text) > (most := max(most, MAX_TOKENIZED)):
        raise PromptTooLong(
            f"The {noun} has {len(text):,} characters, but at most {most:,} are read to be cut: shorten it.", param
        )
    if most is not None and len(text) > most:
        raise PromptTooLong(
            f"This model's maximum context length is {max_tokens} tokens, which cover at most {most} characters, but "
            f"the {noun} has {len(text)}: shorten it.",
            param,
        )

    def encode() -> list[int]:
        return _naming_field(param, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    if len(text) < _LONG_TEXT:
        return encode()
    lane = context.counted_texts if max_tokens is None else context.long_prompts  # who counts delays no answer
    return await lane.do(receive, encode, len(text))


async def count_chat(context: ModelContext, receive: Receive, chat: ChatBody) -> int:
    """How many tokens a chat's prompt has, also where they are more than the model takes: who asks may want to know
    what to cut. Raises InvalidRequest that names the field."""
    text = await render_chat(context.tokenizer, chat.messages, chat, chat.tool_use(context.tool_family))
    if len(text) > MAX_TOKENIZED:
        message = f"The prompt has {len(text):,} characters, but at most {MAX_TOKENIZED:,} are counted: shorten it."
        raise PromptTooLong(message, "messages")
    return len(await encode_text(context, receive, text, add_special_tokens=False, param="messages"))


async def render_chat(
    tokenizer: ServerTokenizer, messages: Sequence[Message], chat: ChatPrompt, tools: ToolUse | None
) -> str:
    """The prompt that the model's chat template makes of `messages`. Raises InvalidRequest that names the field.

    Where the template knows nothing of tools, they are described in the system message. tools: of `chat`.
    """
    _check_roles(messages, tokenizer)
    written = [message.for_template() for message in messages]
    described = None if tools is None else tools.for_template
    otherwise = "in words" if tools is None or tools.form is None else "in JSON, as you are asked to"
    knows_tools = "tools" in (tokenizer.tool_template or "")
    kwargs = chat.template_variables(tokenizer.chat_template)
    if reserved := kwargs.keys() & RESERVED_VARIABLES:
        raise InvalidRequest(f"chat_template_kwargs sets {', '.join(sorted(reserved))}.", "chat_template_kwargs")
    continues, adds = bool(chat.continue_final_message), chat.add_generation_prompt
    if continues and adds:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other.", "continue_final_message"
        )

    def render(turns: list[dict[str, Any]]) -> str:
        if not knows_tools:
            turns = messages_with_tools(turns, described or [], otherwise)
        return tokenizer.apply_chat_template(
            turns,
            add_generation_prompt=not continues if adds is None else adds,  # to continue one is to ask for no new one
            continue_final_message=continues,
            tools=described if knows_tools else None,
            **kwargs,
        )

    def render_all(written: list[dict[str, Any]]) -> str:
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

    def render_whole() -> str:
        if own_roles := Counter(message.role for message in messages if message.role not in ROLES):
            # Whether the template writes what they say, which it may well do in another form, as JSON.
            marks = {role: f"hamburger{number}role" for number, role in enumerate(own_roles)}
            marked = render_all([m | {"content": marks[m["role"]]} if m["role"] in marks else m for m in written])
            for role, number in own_roles.items():
                if marked.count(marks[role]) < number:
                    raise InvalidRequest(
                        f"messages has the role {shown(role)}, whose content the model's chat template leaves out: "
                        f"take one of {', '.join(ROLES)}.",
                        "messages",
                    )
        return render_all(written)

    num_characters = sum(len(message.get("content") or "") for message in written)
    is_long = len(written) > _MANY_MESSAGES or num_characters >= _LONG_TEXT or bool(described or kwargs)
    work = partial(_naming_field, "messages", render_whole)
    return await asyncio.to_thread(work) if is_long else work()


def _check_roles(messages: Sequence[Message], tokenizer: ServerTokenizer) -> None:
    """Beyond OpenAI's roles those that the model was made for, as Llama's `ipython`: any other is a mistake in writing.
    Raises InvalidRequest."""
    for index, message in enumerate(messages):
        if message.role in ROLES:
            continue
        template = f"{tokenizer.chat_template or ''}\n{tokenizer.tool_template or ''}"
        if f"'{message.role}'" not in template and f'"{message.role}"' not in template:
            raise InvalidRequest(
                f"messages[{index}].role is {shown(message.role)}: it must be one of {', '.join(ROLES)}, or a role "
                "that the model's chat template names.",
                "messages",
            )


def bad_word_ids(tokenizer: ServerTokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens, at the beginning of a text and behind a space. Raises InvalidRequest that names bad_words."""
    if (number := sum(map(len, words))) > MAX_BAD_CHARACTERS:
        message = f"bad_words holds {number:,} characters together, but at most {MAX_BAD_CHARACTERS:,} are allowed."
        raise InvalidRequest(message, "bad_words")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise InvalidRequest("bad_words holds an empty word: remove it.", "bad_words")
        for text in (word, " " + word.lstrip()):
            found[tuple(_naming_field("bad_words", partial(tokenizer.encode, text)))] = None
    return tuple(found)


def _naming_field(param: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except TokenizerError as error:
        raise InvalidRequest(str(error), param) from error
