"""ValueEnds: where the JSON values of a text end that grows at its end, and what else was read of it: what was read is
not read again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hamburger.server.tools.python_values import PythonArguments

if TYPE_CHECKING:
    from hamburger.server.tools.json_calls import ToolCall

_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_INSIDE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_WORD = re.compile(r"[^\s,\]}:;]*")


class GrownText(NamedTuple):
    """A value between tags: how far it is told, as JSON, and where its closing tag has ended; None: it may go on."""

    reached: int
    json: str
    end: int | None = None


class Passed:
    """Calls that are whole, and where the next one begins. content: of the text beside them, that which counts."""

    def __init__(self, at: int, calls: Sequence[ToolCall] = (), content: str = "") -> None:
        self.at, self.calls, self.content = at, [*calls], content

    def add(self, call: ToolCall, at: int) -> None:
        self.calls.append(call)
        self.at = at


class ValueEnds:
    """Of one text. Each step of a long answer's stream would else read all of it so far.

    calls: by where calls stand that may be several. marked: all behind markers (tool_parsers.py).
    keys: by where a call's object begins: where its next key does, its name and its arguments (json_calls.py).
    parameters: by where a call in tags begins: where its next parameter does, and those before (tag_calls.py).
    no_calls: by where text begins that is no call, how far it is known to hold none (tool_parsers.py).
    texts: by where a value between tags begins (tag_calls.py).
    python: by where the arguments of a Python call begin (python_calls.py).
    """

    def __init__(self) -> None:
        self.calls: dict[int, Passed] = {}
        self.marked: Passed | None = None
        self.keys: dict[int, tuple[int, str | None, str | None]] = {}
        self.parameters: dict[int, tuple[int, dict[str, str]]] = {}
        self.no_calls: dict[int, int] = {}
        self.texts: dict[int, GrownText] = {}
        self.python: dict[int, PythonArguments] = {}
        self._known: dict[int, int] = {}  # by where a value begins
        self._begin = -1  # of the value that was scanned last, and had no end yet
        self._at = self._depth = 0
        self._is_string = False

    def of(self, text: str, begin: int) -> int | None:
        """The end of the JSON value at `begin`; None while it may go on. It is not checked further."""
        if text[begin] not in '"{[':
            end = max(_WORD.match(text, begin).end(), begin + 1)  # type: ignore[union-attr]
            return end if end < len(text) else None
        if begin not in self._known:
            if begin != self._begin:
                self._begin, self._at, self._depth, self._is_string = begin, begin, 0, False
            if (found := self._scan(text)) is None:
                return None
            self._known[begin] = found
        return self._known[begin]

    def _scan(self, text: str) -> int | None:
        """Go on from where the scan has come to."""
        while True:
            self._at = (_INSIDE if self._is_string else _OUTSIDE).match(text, self._at).end()  # type: ignore[union-attr]
            if self._at >= len(text) or text[self._at] == "\\":  # an escape that is not whole
                return None
            if text[self._at] == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if text[self._at] in "{[" else -1
            self._at += 1
            if self._depth <= 0 and not self._is_string:
                return self._at
