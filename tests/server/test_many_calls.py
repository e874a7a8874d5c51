"""What a step of a stream costs does not grow with the calls, keys and parameters that are there already."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hamburger.server.tools.tool_fields import Function, Tool
from hamburger.server.tools.tool_parsers import Family
from hamburger.server.tools.tool_use import ToolUse

CALL = '{"name": "add", "arguments": {"a": 1}}'
MANY: list[tuple[Family, str, str]] = [
    ("json", "[", f"{CALL}, "),
    ("json", "", f"{CALL}\n"),
    ("json", '{"name": "add", ', '"key": 1, '),
    ("llama3", "<|python_tag|>", f"{CALL}; "),
    ("hermes", "", f"<tool_call>{CALL}</tool_call>\n"),
    ("hermes", "", "<tool_call><function=add><parameter=a>\n1\n</parameter></function></tool_call> "),
    ("hermes", "<tool_call>", "<function=add><parameter=a>\n1\n</parameter></function>\n"),
    ("hermes", "<tool_call><function=add>", "<parameter=a>\n1\n</parameter>\n"),
    ("mistral", "[TOOL_CALLS][", f"{CALL}, "),
    ("mistral", "", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
    ("olmo3", "<function_calls>", "add(a=1)\n"),
    ("pythonic", "[", "add(a=1), "),
]


def streamed(family: Family, begin: str, piece: str, number: int) -> tuple[int, int]:
    """How many functions are called for a stream of so many pieces, each in two halves; and the calls that it told."""
    stream = ToolUse([Tool(type="function", function=Function(name="add"))], None, family).stream()
    half, called, told = len(piece) // 2, 0, set[int]()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for text in [begin, *[piece[:half], piece[half:]] * number]:
            told |= {call["index"] for call in stream.add(text, is_final=False).get("tool_calls", [])}
    finally:
        sys.setprofile(None)
    return called, len(told)


@pytest.mark.parametrize(("family", "begin", "piece"), MANY)
def test_twice_as_many_cost_twice_as_much(family: Family, begin: str, piece: str) -> None:
    some, few_calls = streamed(family, begin, piece, 100)
    more, many_calls = streamed(family, begin, piece, 200)
    assert more < 2.2 * some
    assert (few_calls, many_calls) in [(1, 1), (100, 200)]
