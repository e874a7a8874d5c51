"""Answers that are free text until they call a function: from there on the call is one of a tool, and its arguments
follow the tool's schema. As a grammar, in llguidance's dialect of Lark, for each family's way to write calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from hamburger.server.tools.tool_parsers import (
    HERMES_BEGIN,
    HERMES_END,
    LLAMA_BEGIN,
    MISTRAL_ARGS,
    MISTRAL_BEGIN,
    Family,
)

# Without a marker, text that goes on with a call's first name is a call.
_NO_CALL = r'/(.|\n)*/ & ~/\s*(```(json)?\s*)?\[?\s*\{\s*"name"(.|\n)*/'
_ANY = r"/(.|\n)*/"


def strict_rules(family: Family, names: Sequence[str], token: Callable[[str], int | None]) -> str:
    """The rules; `args0`, `args1`, ... are to be what the functions of these names take.

    token: the id of a marker that is one special token of the model; None of a text.
    """
    numbers = range(len(names))
    match family:
        case "hermes":
            rules = [*_behind(HERMES_BEGIN, token), f"calls: begin WS call WS {_marker(HERMES_END, token)}"]
            rules += ["start: calls* TEXT", f"TEXT: {_ANY}"]
        case "mistral":
            rules = [*_behind(MISTRAL_BEGIN, token), "calls: begin WS (list | named)", "start: calls* TEXT"]
            rules += [f"TEXT: {_ANY}", 'list: "[" WS call (WS "," WS call)* WS "]"']
            args = _marker(MISTRAL_ARGS, token)
            rules.append(_either("named", (f"{json.dumps(name)} {args}? args{i}" for i, name in enumerate(names))))
        case "llama3":
            rules = [*_behind(LLAMA_BEGIN, token), 'calls: begin WS call (WS ";" WS call)*']
            rules += ["start: bare | calls* TEXT", *_bare(numbers)]
        case "json":
            rules = ["start: bare | TEXT", *_bare(numbers)]
    heads = [json.dumps(json.dumps({"name": name})[:-1] + ", ") for name in names]
    rules += [f"HEAD{i}: {head}" for i, head in enumerate(heads)]
    rules += [r'KEY: "\"arguments\": " | "\"parameters\": "', r"WS: /[ \n]{0,8}/"]
    return "\n".join(["%llguidance {}", *rules, _either("call", (f'HEAD{i} KEY args{i} "}}"' for i in numbers))])


def _bare(numbers: Sequence[int]) -> list[str]:
    """Calls that are the whole answer. What they begin with is one terminal, as the lexer would take the bracket of a
    list for text, which is longer."""
    begun = 'bare: (first (WS ";" WS call)* | listed (WS "," WS call)* WS "]") WS'
    firsts = [f"FIRST{i}: WS HEAD{i}" for i in numbers]
    listed = [f'LISTED{i}: WS "[" WS HEAD{i}' for i in numbers]
    calls = [_either(rule.lower(), (f'{rule}{i} KEY args{i} "}}"' for i in numbers)) for rule in ("FIRST", "LISTED")]
    return [begun, *firsts, *listed, *calls, f"TEXT: {_NO_CALL}"]


def _either(rule: str, options: Iterable[str]) -> str:
    return f"{rule}: {' | '.join(options)}"


def _marker(text: str, token: Callable[[str], int | None]) -> str:
    token_id = token(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _behind(begin: str, token: Callable[[str], int | None]) -> list[str]:
    """Text up to a marker."""
    is_text = token(begin) is None  # then it ends as soon as it may
    return [f"begin{'[lazy]' if is_text else ''}: TEXT {_marker(begin, token)}"]
