"""Renders a model's own chat template in a sandbox, in the dialect that transformers gives to chat templates.

A template is a program by the model's author that runs on a user's messages: nothing here trusts either of them.
It must not know tokens, only text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hamburger.engine.types.errors import TokenizerError

# Marks where the final message's text ends in the rendered chat. The space shows whether the template trims messages.
_END_MARK = "\ue000end of the final message\ue000"
_TRIMMED = " "

# Bounds on a template that never ends, or never stops writing. One pass of a loop or call of a macro is a turn: the
# longest chats that a context holds take some per message.
MAX_TURNS = 300_000
MAX_CHARACTERS = 64 * 2**20
MAX_POWER_BITS = 4096
_TURN = "_hamburger_turn"

# What a template can raise besides jinja2's own errors when messages have a shape that it does not expect.
_RENDER_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ChatTemplate:
    """One template, compiled when it is first needed: a model without chats may have one that cannot be."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._template: Template | None = None

    def compile(self) -> Template:
        """Raises TokenizerError when the source is not valid jinja."""
        if self._template is None:
            try:
                self._template = _environment().from_string(self.source)
            except TemplateError as error:
                raise TokenizerError(f"The model's chat template is not valid jinja: {error}") from error
        return self._template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt for `messages`.

        add_generation_prompt: end with the opening of an assistant message.
        continue_final_message: end right after the last message's text, so that the model goes on with it.
        variables: further names for the template; those named by the arguments above win.
        Raises TokenizerError when the template is not valid, refuses the messages or cannot render them.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise TokenizerError(
                    "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt to "
                    "false to continue the final message."
                )
            messages = [*messages[:-1], _mark_end(messages)]
        template = self.compile()
        context = {
            "documents": None,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _write(template, context)
        except TemplateError as error:
            raise TokenizerError(f"The model's chat template refuses these messages: {error}") from error
        except _RENDER_ERRORS as error:
            raise TokenizerError(f"The model's chat template cannot render these messages: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text


def _write(template: Template, context: Mapping[str, Any]) -> str:
    pieces, num_characters = [], 0
    for piece in template.generate(context, **{_TURN: _Turns()}):
        pieces.append(piece)
        num_characters += len(piece)
        _check_size(num_characters)
    return "".join(pieces)


def _mark_end(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A copy of the last message with the mark at the end of its text (string, or its last text part)."""
    final = dict(messages[-1]) if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        return final | {"content": content + _END_MARK + _TRIMMED}
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        for part in reversed(parts):
            if isinstance(part.get("text"), str):
                part["text"] += _END_MARK + _TRIMMED
                return final | {"content": parts}
    raise TokenizerError("continue_final_message needs a final message with text content.")


def _cut_at_mark(text: str) -> str:
    head, mark, tail = text.rpartition(_END_MARK)
    if not mark:
        raise TokenizerError("continue_final_message: the model's chat template leaves out the final message's text.")
    # A template that trims messages would have trimmed the text before the mark too.
    return head if tail.startswith(_TRIMMED) else head.rstrip()


class _Turns:
    """Counts the turns of one rendering, by being written at each: as nothing."""

    def __init__(self) -> None:
        self._left = MAX_TURNS

    def __str__(self) -> str:
        self._left -= 1
        if self._left < 0:
            raise TemplateError(f"it does not come to an end within {MAX_TURNS:,} turns of its loops and macros")
        return ""


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox, in which loops, macros, repeated texts and powers have an end as well."""

    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        blocks: Iterator[Any] = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for node in blocks:
            node.body.insert(0, nodes.Output([nodes.Name(_TURN, "load")]).set_lineno(node.lineno))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, int) and isinstance(other, Sized):
                _check_size(one * len(other))
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and left.bit_length() * right > MAX_POWER_BITS:
            raise TemplateError("it raises a number to a power that is too large")
        return super().call_binop(context, operator, left, right)


def _check_size(num_items: int) -> None:
    if num_items > MAX_CHARACTERS:
        raise TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Their sources by name: chat_template.jinja ("default") and those of additional_chat_templates/, or else what
    tokenizer_config.json, given as `config`, holds: one source, or several with names. Raises TokenizerError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files = {other.stem: other for other in others} | {"default": file}
        return {name: _read_source(path) for name, path in files.items()}
    found = config.get("chat_template") or {}
    if isinstance(found, str):
        return {"default": found}
    try:
        named: dict[Any, Any] = (
            {entry["name"]: entry["template"] for entry in found} if isinstance(found, list) else dict(found)
        )
    except (TypeError, KeyError, ValueError):
        named = {"": None}
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in named.items()):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of objects with a name and a "
            "template, both texts."
        )
    return named


def _read_source(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read as UTF-8 text: {error}") from error
