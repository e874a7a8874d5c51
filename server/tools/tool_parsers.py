"""Tool calls in a model's text, for each family's way to write them. Text in, calls out; no HTTP, no state.

A parser is given the whole text so far, and whether more may come; a stream sends what the last result adds to the one
before (ToolStream). So it does not matter how the text was cut, and what is streamed is what a whole answer says. It is
given the same ValueEnds again as long as the text only grew. Nothing of a text is lost: a marker behind which there is
no call is text, and a call behind a later one is a call.

| family  | written as                                                                  |
| ------- | --------------------------------------------------------------------------- |
| hermes  | <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated (Qwen too) |
| llama3  | {"name": ..., "parameters": {...}}, several with ";" between, after <|python_tag|> or not |
| mistral | [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}, perhaps with |
|         | [CALL_ID]id before [ARGS] |
| json    | one such object, or a list of them, perhaps in a code fence                  |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from hamburger.server.tools.value_ends import ValueEnds

Family = Literal["hermes", "llama3", "mistral", "json"]

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
MISTRAL_BEGIN, MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
LLAMA_BEGIN = "<|python_tag|>"
MARKERS: dict[Family, tuple[str, ...]] = {
    "hermes": (HERMES_BEGIN, HERMES_END),
    "llama3": (LLAMA_BEGIN,),
    "mistral": (MISTRAL_BEGIN, MISTRAL_ARGS),
    "json": (),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON text, as far as it is there."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """content: the text beside the calls, as far as it is sure to be that. Both only ever grow at their ends."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)


Parser = Callable[[str, bool, ValueEnds], Parsed]


def family_of(chat_template: str | None) -> Family:
    """The way that a chat template shows to its model; json where it shows none."""
    for family in ("hermes", "mistral", "llama3"):
        if MARKERS[family][0] in (chat_template or ""):
            return family
    return "json"


def parser_of(family: Family, names: Collection[str]) -> Parser:
    """names: the tools there are; JSON without a marker is only a call if it names one of them."""
    match family:
        case "hermes":
            return partial(_marked, begin=HERMES_BEGIN, end=HERMES_END, find=_any_calls)
        case "mistral":
            return partial(_marked, begin=MISTRAL_BEGIN, find=_mistral_calls)
        case "llama3":
            return partial(_bare, names=names, marker=LLAMA_BEGIN)
        case "json":
            return partial(_bare, names=names, marker=None)


def list_parser(text: str, is_final: bool, ends: ValueEnds) -> Parsed:
    """A JSON list of calls and nothing else, as a grammar made it (tool_choice: required)."""
    found = _calls(text, 0, None, ends)
    return Parsed("", found.calls)


def arguments_parser(name: str) -> Parser:
    """All text is the arguments of one call, as a grammar made it (tool_choice: a named function)."""
    return lambda text, is_final, ends: Parsed("", [ToolCall(name, text)] if text else [])


@dataclass(slots=True)
class _Found:
    """Calls from one place on. end: where they end, None if more may come. is_broken: there is no call there."""

    calls: list[ToolCall] = field(default_factory=list)
    end: int | None = None
    is_broken: bool = False


_Find = Callable[[str, int, bool, ValueEnds], _Found]  # the calls at one place of a text


def _marked(
    text: str,
    is_final: bool,
    ends: ValueEnds,
    *,
    begin: str,
    find: _Find,
    end: str = "",
    start: int = 0,
    calls: Sequence[ToolCall] = (),
) -> Parsed:
    """Calls each stand behind a marker `begin`, perhaps before one `end`; what is beside them is content.

    start: where the text begins, behind the calls that were found before.
    """
    content, calls = "", [*calls]
    searched = ends.no_calls.get(start, start)  # start: of what is neither content nor a call yet
    while (at := text.find(begin, searched)) >= 0:
        searched = at + len(begin)
        found = find(text, searched, is_final, ends)
        if found.is_broken:  # no call: the marker is text, and a later one may begin a call
            ends.no_calls[start] = searched
            continue
        if is_final and not found.calls:
            continue
        content = _joined(content, text[start:at].rstrip(), calls)
        calls += found.calls
        if found.end is None:
            return Parsed(content, calls)
        start = found.end
        behind = _skip(text, start)
        if end and text.startswith(end, behind):
            start = behind + len(end)
        elif end.startswith(text[behind:]) and not is_final:
            return Parsed(content, calls)
        searched = ends.no_calls.get(start, start)
    rest = text[start:] if is_final else _settled(text[start:], begin)
    return Parsed(_joined(content, rest, calls), calls)


def _bare(text: str, is_final: bool, ends: ValueEnds, *, names: Collection[str], marker: str | None) -> Parsed:
    """Calls are all that the text holds, or what stands behind the marker."""
    begin = _skip(text, 0)
    start, calls = 0, list[ToolCall]()
    if not is_final and re.fullmatch(r"(`{1,2}|```(j(s(on?)?)?)?\s*)?", text[begin:]):
        return Parsed("")
    if text[begin : begin + 1] in ("{", "[", "`"):
        fence = re.compile(r"```(?:json)?\s*").match(text, begin)
        found = _calls(text, fence.end() if fence else begin, names, ends)
        if not found.is_broken and (found.calls or not is_final):
            if found.end is None:
                return Parsed("", found.calls)
            start, calls = _skip(text, found.end), found.calls
            if fence and not is_final and "```".startswith(text[start:]):
                return Parsed("", calls)
            if fence and text.startswith("```", start):
                start = _skip(text, start + 3)
    if marker is None:
        return Parsed(text[start:], calls)
    return _marked(text, is_final, ends, begin=marker, find=_any_calls, start=start, calls=calls)


def _any_calls(text: str, at: int, is_final: bool, ends: ValueEnds) -> _Found:
    return _calls(text, at, None, ends)


def _mistral_calls(text: str, at: int, is_final: bool, ends: ValueEnds) -> _Found:
    at = _skip(text, at)
    word = r'[^\s\[\]{}"]'
    if named := re.compile(rf"({word}+)\s*(?:\[CALL_ID\]{word}*)?(?:\[ARGS\])?\s*(?=\{{)").match(text, at):
        end = ends.of(text, named.end())
        return _Found([ToolCall(named[1], text[named.end() : end])], end)
    if not is_final and re.compile(rf"{word}*\s*(\[CALL_ID\]{word}*)?(\[[A-Z_]*\]?)?\s*$").match(text, at):
        return _Found()
    return _calls(text, at, None, ends)


def _calls(text: str, start: int, names: Collection[str] | None, ends: ValueEnds) -> _Found:
    """An object, or a list of objects, or objects with `;` or `,` between them. names: None for any."""
    found, at = _Found(), _skip(text, start)
    in_list = text.startswith("[", at)
    if in_list:
        at = _skip(text, at + 1)
    while at < len(text):
        if in_list and text[at] == "]":
            found.end, found.is_broken = at + 1, not found.calls
            return found
        call, end, is_broken = _call(text, at, ends)
        if is_broken or (call is not None and names is not None and call.name not in names):
            found.is_broken = not found.calls
            found.end = at if found.calls else None
            return found
        if call is not None:
            found.calls.append(call)
        if end is None:
            return found
        at = _skip(text, end)
        if at < len(text) and text[at] in (",;" if not in_list else ","):
            at = _skip(text, at + 1)
        elif not in_list and text[at : at + 1] != "{":
            found.end = end
            return found
    if found.calls and not in_list:
        found.end = at
    return found


def _call(text: str, at: int, ends: ValueEnds) -> tuple[ToolCall | None, int | None, bool]:
    """The call that an object at `at` is: (the call, once its name is known; its end; whether it cannot be one).

    A call that was sent stays one: where the JSON breaks after its name, it ends. Of a key that is there twice the
    first counts.
    """
    if text[at] != "{":
        return None, None, True
    name: str | None = None
    arguments: str | None = None
    at = _skip(text, at + 1)
    while at < len(text) and text[at] != "}":
        key_end = ends.of(text, at) if text[at] == '"' else at
        colon = len(text) if key_end is None else _skip(text, key_end)
        start = _skip(text, colon + 1)
        if colon < len(text) and text[colon] != ":":
            return _made(name, arguments), at, name is None
        if key_end is None or start >= len(text):
            return _made(name, arguments), None, False
        key, end = _string(text[at:key_end]), ends.of(text, start)
        if key == "name" and name is None:
            name = _string(text[start:end]) if end is not None else None
            if text[start] != '"' or (end is not None and name is None):
                return None, None, True
        elif key in ("arguments", "parameters") and arguments is None:
            arguments = _arguments(text, start, end)
        if end is None:
            return _made(name, arguments), None, False
        at = _skip(text, end)
        if at < len(text) and text[at] == ",":
            at = _skip(text, at + 1)
        elif at < len(text) and text[at] != "}":
            return _made(name, arguments), at, name is None
    if at >= len(text):
        return _made(name, arguments), None, False
    if name is None:
        return None, None, True
    return ToolCall(name, "{}" if arguments is None else arguments), at + 1, False


def _made(name: str | None, arguments: str | None) -> ToolCall | None:
    return None if name is None else ToolCall(name, arguments or "")


def _arguments(text: str, start: int, end: int | None) -> str:
    """The text of the arguments at `start`; some models write it as a JSON string, which is given once it is whole."""
    if text[start] == '"':
        return "" if end is None else _string(text[start:end]) or "{}"
    if text[start] in "{[":
        return text[start:end]
    return "" if end is None else "{}"  # null, and what no arguments can be


def _string(literal: str) -> str | None:
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return None
    return utf8(value) if isinstance(value, str) else None


def utf8(text: str) -> str:
    """An escape can spell half a surrogate pair, which no UTF-8 has."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _skip(text: str, at: int) -> int:
    """The first place from `at` on that is no white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _settled(text: str, marker: str) -> str:
    """What of the text cannot be the white space before a marker, or the marker's beginning."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            text = text[:-size]
            break
    return text.rstrip()


def _joined(content: str, more: str, calls: Sequence[ToolCall]) -> str:
    """White space between calls is none of the content."""
    if not calls:
        return more
    return content + (more if content else more.lstrip("\n")) if more.strip() else content
