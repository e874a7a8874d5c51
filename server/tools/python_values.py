"""PythonArguments: what stands between the brackets of a Python call, as JSON, while it is written. Nothing is run.

    city="Paris", days=[1, 2], when=None        ->        {"city": "Paris", "days": [1, 2], "when": null}

Values are Python's literals and JSON's; a word that is none of them is a string. What else Python has (sums, calls,
sets) breaks the call where it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

_SPACE = re.compile(r"[ \t\r\n]*")
_KEYWORD = re.compile(r"([^\W\d]\w*)\s*(=)?")
_STRING = re.compile(r"""([rRbBuUfF]{0,2})(\"\"\"|'''|"|')""")
_WORD = re.compile(r"""[^\s,()\[\]{}:="']+""")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|"
    r"u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))",
    re.DOTALL,
)
_BEGUN_ESCAPE = re.compile(
    r"\\(?:[0-7]{0,2}|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u\w{0,3})?)?)\Z"
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""} | dict(
    zip("\\'\"", "\\'\"", strict=True)
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_State = Literal["item", "key's colon", "value", "behind"]


class PythonArguments:
    """Of a text that only grows: each character is read once.

    json: as far as it is sure. end: behind the call's bracket, once it is there. at: how far the text was read.
    is_broken: what stands at `at` belongs to no such call.
    """

    def __init__(self, begin: int, names: Sequence[str]) -> None:
        """begin: behind the call's first bracket. names: of parameters in their order, for values without one."""
        self.at, self.is_broken, self.json = begin, False, "{"
        self.end: int | None = None
        self._names = names
        self._keys = set[str]()
        self._open = ["("]  # brackets
        self._num_items = [0]  # begun within each of them
        self._state: _State = "item"  # what comes next
        self._quote = ""  # of the string that the text is in
        self._is_raw = self._is_key = False

    def read(self, text: str) -> None:
        """Go on from where it has come to. text: the whole of it."""
        while self.end is None and not self.is_broken and self._step(text):
            pass

    def _step(self, text: str) -> bool:
        """Whether it has come further."""
        if self._quote:
            return self._in_string(text)
        self.at = _SPACE.match(text, self.at).end()  # type: ignore[union-attr]
        if self.at >= len(text):
            return False
        character, bracket = text[self.at], self._open[-1]
        if character == _CLOSING[bracket] and self._state in ("item", "behind"):
            return self._close()
        if self._state == "behind":
            return self._pass("item") if character == "," else self._break()
        if self._state == "key's colon":
            self.json += ": "
            return self._pass("value") if character == ":" else self._break()
        if self._state == "item" and len(self._open) == 1:
            return self._argument(text)
        return self._value(text)

    def _pass(self, state: _State) -> bool:
        self.at, self._state = self.at + 1, state
        return True

    def _break(self) -> bool:
        self.is_broken = True
        return False

    def _close(self) -> bool:
        self.json += "}" if self._open.pop() == "{" or not self._open else "]"
        self._num_items.pop()
        self._pass("behind")
        if not self._open:
            self.end = self.at
        return True

    def _argument(self, text: str) -> bool:
        """The name of an argument, or none before a value."""
        found = _KEYWORD.match(text, self.at)
        if found and found.end() == len(text) and not found[2]:
            return False
        named = found if found and found[2] else None
        key = named[1] if named else next((name for name in self._names if name not in self._keys), "")
        if not key or key in self._keys:
            return self._break()
        self._keys.add(key)
        self._begin_item()
        self.json += f"{_quoted(key)}: "
        self.at, self._state = named.end() if named else self.at, "value"
        return True

    def _begin_item(self) -> None:
        self.json += ", " if self._num_items[-1] else ""
        self._num_items[-1] += 1

    def _value(self, text: str) -> bool:
        """A value's beginning, or a word that is all of it, or the same of a key in braces."""
        is_item = self._state == "item"
        is_key = is_item and self._open[-1] == "{"
        string, word = _STRING.match(text, self.at), _WORD.match(text, self.at)
        if string:
            if text[string.start(2) :] in ('"', '""', "'", "''"):  # one quote, or the first of three
                return False
        elif word:
            if word.end() == len(text):
                return False
        elif text[self.at] not in "([{" or is_key:
            return self._break()
        if is_item:
            self._begin_item()
        self._is_key = is_key
        if string:
            self._quote, self._is_raw = string[2], "r" in string[1].lower()
            self.json += '"'
            self.at = string.end()
        elif word:
            self.json += _quoted(word[0]) if is_key else _as_json(word[0])
            self.at = word.end()
            self._end_value()
        else:
            self._open.append(text[self.at])
            self._num_items.append(0)
            self.json += "{" if text[self.at] == "{" else "["
            self._pass("item")
        return True

    def _end_value(self) -> None:
        self._state = "key's colon" if self._is_key else "behind"

    def _in_string(self, text: str) -> bool:
        plain = _PLAIN[self._quote[0]].match(text, self.at)
        if plain:
            return self._add(plain[0], plain.end())
        rest = text[self.at : self.at + len(self._quote)]
        if rest == self._quote:
            self.json += '"'
            self.at, self._quote = self.at + len(rest), ""
            self._end_value()
            return True
        if self._quote.startswith(rest):  # the end of the text, perhaps within three quotes
            return False
        if rest[0] != "\\":
            return self._add(rest[0], self.at + 1)
        if self._is_raw:
            return len(text) > self.at + 1 and self._add(text[self.at : self.at + 2], self.at + 2)
        escape = _ESCAPE.match(text, self.at)
        if escape is None or _BEGUN_ESCAPE.match(text, self.at):
            return False
        return self._add(_meant(escape), escape.end())

    def _add(self, characters: str, end: int) -> bool:
        self.json += _quoted(characters)[1:-1]
        self.at = end
        return True


def _meant(escape: re.Match[str]) -> str:
    octal, byte, pair, four, eight, letter = escape.groups()
    if letter is not None:
        return _LETTERS.get(letter, escape[0])
    if pair is not None:
        high, low = int(pair[1:5], 16), int(pair[7:], 16)
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
    number = int(octal, 8) if octal is not None else int(byte or four or eight, 16)
    is_character = number <= 0x10FFFF and not 0xD800 <= number < 0xE000  # no UTF-8 has half a pair
    return chr(number) if is_character else "\ufffd"


def _as_json(word: str) -> str:
    if _NUMBER.fullmatch(word):
        return word
    return _CONSTANTS.get(word) or _quoted(word)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
