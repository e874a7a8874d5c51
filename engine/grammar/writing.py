"""What a client asks for, as llguidance's own text, in which a grammar crosses to the core (SamplingParams.grammar)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hamburger.engine.grammar.closed_objects import closed
from hamburger.engine.grammar.json_schema import MAX_DEPTH, MAX_LEVELS, depth_of, fault_of, levels_of, usable_schema
from hamburger.engine.types.errors import InvalidRequest

# JSON allows white space without end, and small models like it: one space, or one line break and its indentation.
WHITE_SPACE = r" ?|\n {0,16}"
# oneOf as anyOf: where its branches cannot be told apart, no grammar can say that only one of them fits.
_READING: Any = {"whitespace_pattern": WHITE_SPACE, "coerce_one_of": True}
# As json.dumps writes it, and models have mostly read it: without any white space small ones lose their way.
_COMPACT: Any = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True,
}  # fmt: skip
# The library follows rules by recursion: some thousand levels would end the process, not raise an error.
MAX_PARTS = 1000
MAX_CHARACTERS = 500_000  # of a grammar, as the client wrote it: beyond, compiling takes seconds and hundreds of MB
# Of Lark or GBNF: a class, a text, a comment, an expression. And a rule of GBNF that has the name of Lark's first.
_LITERAL = re.compile(r"""\[(?:\\.|[^\]\\\n])*\]|"(?:\\.|[^"\\\n])*"|//.*|\#.*|/(?:\\.|[^/\\\n])+/""")
_START = re.compile(rf"{_LITERAL.pattern}|(?<![\w-])(start)(?![\w-])")
# A character of GBNF by its number, which llguidance's converter writes without its zeros.
_NUMBERED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_OPENINGS = ":([{"  # no level of a grammar is without one
_OF_SCHEMA = re.compile(r"failed to compile JSON schema: (.*)")


def json_grammar(schema: Mapping[str, Any] | bool | None = None, *, compact: bool = False) -> str:
    """JSON text that a JSON Schema (draft 2020-12) allows; None: any object. compact: on one line, with a space behind
    commas and colons and nowhere else; otherwise the model may also break lines and indent.

    Raises InvalidRequest for one that is nested too deeply to be read, or too large to be compiled soon.
    """
    from llguidance import LLMatcher

    text = _schema_text(schema)
    _check_size("schema", len(text), "response_format")
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT if compact else _READING)
    except ValueError as error:
        raise InvalidRequest(f"The schema cannot be read: {shown(str(error))}.", "response_format") from error
    return grammar


def grammar_with_schemas(
    rules: str, schemas: Sequence[Mapping[str, Any] | bool | None], *, compact: bool = False
) -> str:
    """Rules in llguidance's dialect of Lark, in which `args0`, `args1`, ... are JSON text that these schemas allow.

    compact, and raises InvalidRequest: as json_grammar.
    """
    from llguidance import LLMatcher

    reading = _COMPACT if compact else _READING
    texts = [json.dumps({**json.loads(_schema_text(schema)), "x-guidance": reading}) for schema in schemas]
    lark = "\n".join([rules, *(f"args{i}: %json {text}" for i, text in enumerate(texts))])
    _check_size("schemas", len(lark), "response_format")
    grammar: str = LLMatcher.grammar_from_lark(lark)
    return grammar


def _schema_text(schema: Mapping[str, Any] | bool | None) -> str:
    """As the library reads it. Raises InvalidRequest for one that is too much to be tried."""
    if schema is None:
        return json.dumps({"type": "object"})
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}  # the library reads objects only
    if (depth := depth_of(schema)) > MAX_DEPTH:
        raise InvalidRequest(
            f"The schema is nested {depth} levels deep, but at most {MAX_DEPTH} are allowed: use fewer levels, or "
            "references.",
            "response_format",
        )
    if (levels := levels_of(schema)) > MAX_LEVELS:
        raise InvalidRequest(
            f"The schema and all that its references lead to have {levels} levels together, but at most {MAX_LEVELS} "
            "are allowed: use fewer references.",
            "response_format",
        )
    usable = usable_schema(schema)
    if (fault := fault_of(usable)) is not None:
        raise InvalidRequest(f"The schema has {fault}.", "response_format")
    return json.dumps(closed(usable))


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression (Rust's regex syntax) matches as a whole. Raises InvalidRequest if it is large."""
    _check_size("regular expression", len(pattern), "structured_outputs")
    return _regex_grammar(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of several texts. Raises InvalidRequest where they are large together."""
    _check_size("choice", sum(len(choice) + 1 for choice in choices), "structured_outputs")  # empty ones count too
    return _regex_grammar("|".join(f"({re.escape(choice)})" for choice in choices))


def context_free_grammar(text: str) -> str:
    """A context-free grammar, in llguidance's dialect of Lark (it has a rule `start`) or in GBNF (`root`).

    Raises InvalidRequest for one that is too large, or no GBNF.
    """
    _check_size("grammar", len(text), "structured_outputs")
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    is_gbnf = "::=" in _LITERAL.sub("", text)
    try:
        lark = gbnf_to_lark(_NUMBERED.sub(_by_itself, _START.sub(_other_start, text))) if is_gbnf else text
    except MemoryError:
        raise  # it is not the grammar's form
    except Exception as error:  # llguidance's converter raises bare Exception, and RecursionError for deep ones
        raise InvalidRequest(
            f"The grammar has `::=`, but is no GBNF: {shown(str(error))}.", "structured_outputs"
        ) from error
    if (num_parts := sum(map(lark.count, _OPENINGS))) > MAX_PARTS:
        raise InvalidRequest(
            f"The grammar has {num_parts} rules and brackets ({' '.join(_OPENINGS)}), but at most {MAX_PARTS} are "
            "allowed.",
            "structured_outputs",
        )
    grammar: str = LLMatcher.grammar_from_lark(lark)
    return grammar


def _other_start(found: re.Match[str]) -> str:
    return "start-of-client" if found[1] else found[0]


def _by_itself(found: re.Match[str]) -> str:
    number = int(found[1] or found[2] or "0", 16)
    if not number or 0xD800 <= number < 0xE000 or number > sys.maxunicode:
        return found[0]
    return f"\\x{number:02x}" if number < 128 else chr(number)


def _regex_grammar(pattern: str) -> str:
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_regex(pattern)
    return grammar


def _check_size(name: str, num_characters: int, param: str) -> None:
    if num_characters > MAX_CHARACTERS:
        raise InvalidRequest(
            f"The {name} has {num_characters:,} characters, but at most {MAX_CHARACTERS:,} are allowed.", param
        )


def shown(message: str) -> str:
    """The library's message on one line, of a length fit for people."""
    message = message.partition("<state>")[0]
    if found := _OF_SCHEMA.search(message):  # what follows are rules of ours, around a client's schema
        message = found[1]
    return " ".join(message.split())[:300].rstrip(".")
