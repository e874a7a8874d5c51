"""Calls of an answer that is calls or none, as a grammar made it: its beginning says which. So an answer without calls
is streamed as it comes, and what it holds is no call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hamburger.server.tools.tool_parsers import BARE, MARKERS, Family, Parsed, Parser, parser_of
from hamburger.server.tools.value_ends import ValueEnds

_MOST_BEGINNING = 300  # characters of a call before its arguments, with the white space that a grammar allows


def answer_or_calls_parser(family: Family, schemas: Mapping[str, Mapping[str, Any]]) -> Parser:
    """schemas: of the arguments of the tools that may be called, by their names."""
    markers = MARKERS[family][:1]
    heads: tuple[str, ...] = ()
    if family in BARE:
        heads = tuple(f'{{"name":"{name}","{key}":{{' for name in schemas for key in ("arguments", "parameters"))
    return partial(_parsed, markers=markers, heads=heads, calls=parser_of(family, schemas, is_held=True))


def _parsed(
    text: str, is_final: bool, ends: ValueEnds, *, markers: tuple[str, ...], heads: tuple[str, ...], calls: Parser
) -> Parsed:
    begun = "".join(text.lstrip()[:_MOST_BEGINNING].split())
    bare = begun.removeprefix("[") if heads else begun
    if begun.startswith(markers) or bare.startswith(heads):
        return calls(text, is_final, ends)
    may_be_calls = any(head.startswith(bare) for head in heads) or any(marker.startswith(begun) for marker in markers)
    return Parsed("" if may_be_calls and not is_final else text)
