"""Tool calls in a model's text, for each family's way to write them. Text in, calls out; no HTTP, no state.

A parser is given the whole text so far, and whether more may come; a stream sends what the last result adds to the one
before (ToolStream). So it does not matter how the text was cut, and what is streamed is what a whole answer says. It is
given the same ValueEnds again as long as the text only grew. Nothing of a text is lost: a marker behind which there is
no call is text, and a call behind a later one is a call.

| family  | written as                                                                  |
| ------- | --------------------------------------------------------------------------- |
| hermes  | <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated (Qwen too), or tags within |
|         | (tag_calls.py)                                                              |
| llama3  | {"name": ..., "parameters": {...}}, several with ";" between, after <|python_tag|> or not |
| granite | <|tool_call|>[{"name": ..., "arguments": {...}}, ...], or without the marker |
| mistral | [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}, perhaps with |
|         | [CALL_ID]id before [ARGS] |
| olmo3   | <function_calls>name(key="value", ...)</function_calls>, several on lines of their own |
| pythonic | [name(key="value", ...), ...] |
| json    | one such object, or a list of them, perhaps in a code fence                  |

Where Python is written (python_calls.py) JSON is a call, too: a grammar makes it (call_rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from hamburger.server.tools.json_calls import Found, ToolCall, calls_at, skip
from hamburger.server.tools.python_calls import python_or_json_calls
from hamburger.server.tools.tag_calls import FUNCTION, bare_tag_call, tag_call
from hamburger.server.tools.value_ends import Passed, ValueEnds

Family = Literal["hermes", "llama3", "granite", "mistral", "olmo3", "pythonic", "json"]

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
MISTRAL_BEGIN, MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
LLAMA_BEGIN, GRANITE_BEGIN = "<|python_tag|>", "<|tool_call|>"
OLMO_BEGIN, OLMO_END = "<function_calls>", "</function_calls>"
MARKERS: dict[Family, tuple[str, ...]] = {
    "hermes": (HERMES_BEGIN, HERMES_END),
    "llama3": (LLAMA_BEGIN,),
    "granite": (GRANITE_BEGIN,),
    "mistral": (MISTRAL_BEGIN, MISTRAL_ARGS),
    "olmo3": (OLMO_BEGIN, OLMO_END),
    "pythonic": (),
    "json": (),
}
BARE: frozenset[Family] = frozenset(["llama3", "granite", "pythonic", "json"])  # whose calls need no marker
_PYTHON_EXAMPLE = "[func_name1("  # as templates show it, in the words of Meta's


@dataclass(frozen=True, slots=True)
class Parsed:
    """content: the text beside the calls, as far as it is sure to be that. Both only ever grow at their ends."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)


Parser = Callable[[str, bool, ValueEnds], Parsed]


def family_of(chat_template: str | None) -> Family:
    """The way that a chat template shows to its model; json where it shows none."""
    shown = chat_template or ""
    for family in ("hermes", "mistral", "olmo3", "llama3", "granite"):
        if MARKERS[family][0] in shown:
            return family
    return "pythonic" if _PYTHON_EXAMPLE in shown else "json"


def parser_of(family: Family, schemas: Mapping[str, Mapping[str, Any]], *, is_held: bool = False) -> Parser:
    """schemas: of the tools' arguments, by their names. A call without a marker must name one of them.

    is_held: whether a grammar holds the calls behind markers, so that others, which it knows as text, are none.
    """
    match family:
        case "hermes":
            find = partial(_hermes_calls, schemas=schemas)
            return partial(_marked, begin=HERMES_BEGIN, end=HERMES_END, find=find, bare="" if is_held else FUNCTION)
        case "mistral":
            return partial(_marked, begin=MISTRAL_BEGIN, find=_mistral_calls)
        case "olmo3":
            find = partial(_python_calls, schemas=schemas)
            return partial(_marked, begin=OLMO_BEGIN, end=OLMO_END, find=find)
        case "llama3" | "granite":
            [marker] = MARKERS[family]
            return partial(_bare, find=partial(_known_calls, names=schemas), marker=marker)
        case "pythonic" if not is_held:
            return partial(_bare, find=partial(_python_calls, schemas=schemas, only_known=True), marker=None)
        case _:
            return partial(_bare, find=partial(_known_calls, names=schemas), marker=None)


def list_parser(text: str, is_final: bool, ends: ValueEnds) -> Parsed:
    """A JSON list of calls and nothing else, as a grammar made it (tool_choice: required)."""
    found = calls_at(text, 0, None, ends)
    return Parsed("", found.calls)


def arguments_parser(name: str) -> Parser:
    """All text is the arguments of one call, as a grammar made it (tool_choice: a named function)."""
    return lambda text, is_final, ends: Parsed("", [ToolCall(name, text)] if text else [])


_Find = Callable[[str, int, bool, ValueEnds], Found]  # the calls at one place of a text


def _marked(
    text: str,
    is_final: bool,
    ends: ValueEnds,
    *,
    begin: str,
    find: _Find,
    end: str = "",
    bare: str = "",
    start: int = 0,
    calls: Sequence[ToolCall] = (),
) -> Parsed:
    """Calls each stand behind a marker `begin`, perhaps before one `end`; what is beside them is content. Those that
    begin with `bare` may lack their marker, as Qwen3-Coder forgets it.

    start: where the text begins, behind the calls that were found before.
    """
    passed = ends.marked or Passed(start, calls)
    start, content, calls = passed.at, passed.content, [*passed.calls]
    searched = ends.no_calls.get(start, start)  # start: of what is neither content nor a call yet
    while (at := _next_call(text, begin, bare, searched)) >= 0:
        searched = at + (len(begin) if text.startswith(begin, at) else len(bare))
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
        behind = skip(text, start)
        if end and text.startswith(end, behind):
            start = behind + len(end)
        elif end.startswith(text[behind:]) and not is_final:
            return Parsed(content, calls)
        ends.marked = Passed(start, calls, content)
        searched = ends.no_calls.get(start, start)
    ends.no_calls[start] = max(searched, len(text) - max(len(begin), len(bare)) + 1)
    rest = text[start:] if is_final else min((_settled(text[start:], each) for each in (begin, bare)), key=len)
    return Parsed(_joined(content, rest, calls), calls)


def _next_call(text: str, begin: str, bare: str, start: int) -> int:
    """Where the next one begins; below 0: nowhere."""
    marked = text.find(begin, start)
    other = text.find(bare, start, marked if marked >= 0 else len(text)) if bare else -1
    return marked if other < 0 else other


def _bare(text: str, is_final: bool, ends: ValueEnds, *, find: _Find, marker: str | None) -> Parsed:
    """Calls are all that the text holds, or what stands behind the marker."""
    begin = skip(text, 0)
    start, calls = 0, list[ToolCall]()
    if not is_final and re.fullmatch(r"(`{1,2}|```(j(s(on?)?)?)?\s*)?", text[begin:]):
        return Parsed("")
    if text[begin : begin + 1] in ("{", "[", "`"):
        fence = re.compile(r"```(?:json)?\s*").match(text, begin)
        found = find(text, fence.end() if fence else begin, is_final, ends)
        if not found.is_broken and (found.calls or not is_final):
            if found.end is None:
                return Parsed("", found.calls)
            start, calls = skip(text, found.end), found.calls
            if fence and not is_final and "```".startswith(text[start:]):
                return Parsed("", calls)
            if fence and text.startswith("```", start):
                start = skip(text, start + 3)
    if marker is None:
        return Parsed(text[start:], calls)
    return _marked(text, is_final, ends, begin=marker, find=_any_calls, start=start, calls=calls)


def _any_calls(text: str, at: int, is_final: bool, ends: ValueEnds) -> Found:
    return calls_at(text, at, None, ends)


def _known_calls(text: str, at: int, is_final: bool, ends: ValueEnds, *, names: Collection[str]) -> Found:
    return calls_at(text, at, names, ends)


def _python_calls(
    text: str,
    at: int,
    is_final: bool,
    ends: ValueEnds,
    *,
    schemas: Mapping[str, Mapping[str, Any]],
    only_known: bool = False,
) -> Found:
    return python_or_json_calls(text, at, schemas, ends, only_known=only_known)


def _hermes_calls(
    text: str, at: int, is_final: bool, ends: ValueEnds, *, schemas: Mapping[str, Mapping[str, Any]]
) -> Found:
    is_bare = text.startswith(FUNCTION, at - len(FUNCTION))
    at = at - len(FUNCTION) if is_bare else skip(text, at)
    begin, passed = at, ends.calls.get(at, Passed(at))
    found, at = Found([*passed.calls]), passed.at
    while text.startswith(FUNCTION, at):
        if found.calls:
            ends.calls[begin] = Passed(at, found.calls)
        one = (bare_tag_call if is_bare else tag_call)(text, at, ends, schemas)
        if one.is_broken and found.calls:
            return found
        found = Found([*found.calls, *one.calls], one.end, one.is_broken)
        if found.end is None:
            return found
        at = skip(text, found.end)
    if FUNCTION.startswith(text[at:]) and not is_final:  # another one may come
        return Found(found.calls)
    return found if found.calls or is_bare else calls_at(text, at, None, ends)


def _mistral_calls(text: str, at: int, is_final: bool, ends: ValueEnds) -> Found:
    at = skip(text, at)
    word = r'[^\s\[\]{}"]'
    if named := re.compile(rf"({word}+)\s*(?:\[CALL_ID\]{word}*)?(?:\[ARGS\])?\s*(?=\{{)").match(text, at):
        end = ends.of(text, named.end())
        return Found([ToolCall(named[1], text[named.end() : end])], end)
    if not is_final and re.compile(rf"{word}*\s*(\[CALL_ID\]{word}*)?(\[[A-Z_]*\]?)?\s*$").match(text, at):
        return Found()
    return calls_at(text, at, None, ends)


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
