"""Answers that call functions or not, as grammars in llguidance's dialect of Lark, for each family's way to write
calls. A call is one of a tool, and its arguments follow a schema; all else is free text, or JSON of a schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from hamburger.engine.grammar.json_numbers import JSON_BEGIN
from hamburger.server.tools.reasoning import Markers
from hamburger.server.tools.tool_parsers import GRANITE_BEGIN, LLAMA_BEGIN, MARKERS, MISTRAL_ARGS, MISTRAL_BEGIN, Family

# Without a marker, text that goes on with a call's first name is a call.
_NO_CALL = r'/(.|\n)*/ & ~/\s*(```(json)?\s*)?\[?\s*\{\s*"name"(.|\n)*/'
_NO_PYTHON = r" & ~/\s*\[\s*({names})\s*\((.|\n)*/"
_ANY = r"/(.|\n)*/"


def free_or_calls(family: Family, names: Sequence[str], token: Callable[[str], int | None]) -> str:
    """An answer that is free text until it calls. `args0`, `args1`, ... are to be what the functions of these names
    take.

    token: the id of a marker that is one special token of the model; None of a text.
    """
    numbers = range(len(names))
    match family:
        case "hermes" | "olmo3":
            begin, end = MARKERS[family]
            rules = [*_behind(begin, token), f"calls: begin WS call WS {_marker(end, token)}"]
            rules += ["start: calls* TEXT", f"TEXT: {_ANY}"]
        case "mistral":
            rules = [*_behind(MISTRAL_BEGIN, token), "calls: begin WS (list | named)", "start: calls* TEXT"]
            rules += [f"TEXT: {_ANY}", 'list: "[" WS call (WS "," WS call)* WS "]"']
            rules.append(_named(names, _marker(MISTRAL_ARGS, token)))
        case "llama3":
            rules = [*_behind(LLAMA_BEGIN, token), 'calls: begin WS call (WS ";" WS call)*']
            rules += ["start: bare | calls* TEXT", *_bare(numbers)]
        case "granite":
            rules = [*_behind(GRANITE_BEGIN, token), 'calls: begin WS "[" WS call (WS "," WS call)* WS "]"']
            rules += ["start: bare | calls* TEXT", *_bare(numbers)]
        case "pythonic":  # taught another way: no text may begin as a call of that
            rules = ["start: bare | TEXT", *_bare(numbers)]
            rules[-1] += _NO_PYTHON.format(names="|".join(names))
        case "json":
            rules = ["start: bare | TEXT", *_bare(numbers)]
    return "\n".join(["%llguidance {}", *rules, *_call(names)])


def format_or_calls(
    family: Family, names: Sequence[str], token: Callable[[str], int | None], most: int, thought: Markers | None
) -> str:
    """An answer that is JSON, or calls and nothing beside them. As free_or_calls; the last of the rules `args` is the
    JSON, in which bare calls are.

    most: calls. thought: markers of a text that may stand before; that must, where the first one is empty, as it has
    begun. None: there is no such text.
    """
    ones = _repeated("one", "WS", most)
    match family:
        case "hermes" | "olmo3":
            begin, end = (_marker(text, token) for text in MARKERS[family])
            calls = [f"calls: {ones}", f"one: {begin} WS call WS {end}"]
        case "mistral":
            begin, args = _marker(MISTRAL_BEGIN, token), _marker(MISTRAL_ARGS, token)
            listed = _repeated("call", 'WS "," WS', most)
            calls = [f"calls: {begin} WS list | {ones}", f"one: {begin} WS named", _named(names, args)]
            calls.append(f'list: "[" WS {listed} WS "]"')
        case "llama3":
            listed = _repeated("call", 'WS ";" WS', most)
            calls = [f"calls: {_marker(LLAMA_BEGIN, token)} WS {listed}"]
        case "granite":
            listed = _repeated("call", 'WS "," WS', most)
            calls = [f'calls: {_marker(GRANITE_BEGIN, token)} WS "[" WS {listed} WS "]"']
        case "pythonic" | "json":
            calls = []
    values = f"values: args{len(names)}{' | calls' if calls else ''}"
    if thought is None:
        return "\n".join([JSON_BEGIN, values, *calls, *_call(names)])
    begin, end = map(json.dumps, thought)
    start = "start: thought WS values" if not thought.begin else "start: (thought WS)? values"
    inside = f"thought[lazy]: {begin if thought.begin else ''} {_ANY} {end}"
    return "\n".join(["%llguidance {}", start, inside, values, *calls, *_call(names)])


def _repeated(rule: str, between: str, most: int) -> str:
    return rule if most == 1 else f"{rule} ({between} {rule}){{0,{most - 1}}}"


def _call(names: Sequence[str]) -> list[str]:
    heads = [json.dumps(json.dumps({"name": name})[:-1] + ", ") for name in names]
    rules = [f"HEAD{i}: {head}" for i, head in enumerate(heads)]
    rules += [r'KEY: "\"arguments\": " | "\"parameters\": "', r"WS: /[ \n]{0,8}/"]
    return [*rules, _either("call", (f'HEAD{i} KEY args{i} "}}"' for i in range(len(names))))]


def _named(names: Sequence[str], args: str) -> str:
    return _either("named", (f"{json.dumps(name)} {args}? args{i}" for i, name in enumerate(names)))


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
