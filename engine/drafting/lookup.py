"""Drafts without a model: what followed the newest tokens where they came before. For every base model.

`Lookup` searches prompt and answer; `Prediction` follows a text that the client expects, and finds its way back to it
after a change. Both are lists and dictionaries: a token costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST, _SHORTEST = 4, 2  # tokens that must have come before


class Lookup:
    """N-grams of a growing text: prompt lookup decoding (Saxena 2023)."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text: list[int] = []
        # What follows the last n tokens where they came last, for each n.
        self._ends: dict[tuple[int, ...], int] = {}
        self._newest: list[tuple[tuple[int, ...], int]] = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            for gram, end in self._newest:  # what ends with the newest token must not find itself
                self._ends[gram] = end
            self._text.append(token_id)
            end = len(self._text)
            self._newest = [(tuple(self._text[end - n :]), end) for n in range(_SHORTEST, _LONGEST + 1) if n <= end]

    def after(self, most: int) -> list[int]:
        """At most so many tokens that may come next."""
        for gram, _ in reversed(self._newest):
            if (end := self._ends.get(gram)) is not None:
                return self._text[end : end + most]
        return []


class Prediction:
    """A text that the answer is expected to follow, if with changes."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = list(token_ids)
        self._places: dict[tuple[int, ...], list[int]] = {}
        for n in range(_SHORTEST, _LONGEST + 1):
            for end in range(n, len(self._text) + 1):
                self._places.setdefault(tuple(self._text[end - n : end]), []).append(end)
        self._answer: list[int] = []
        self._next: int | None = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._answer = [*self._answer[1 - _LONGEST :], token_id]
            if self._next is not None and self._next < len(self._text) and self._text[self._next] == token_id:
                self._next += 1
            else:
                self._next = self._found_again()

    def after(self, most: int) -> list[int]:
        """At most so many tokens that may come next."""
        return [] if self._next is None else self._text[self._next : self._next + most]

    def _found_again(self) -> int | None:
        """Behind the longest end of the answer that the text has, the first of them from where it was left on."""
        for n in range(_LONGEST, _SHORTEST - 1, -1):
            if len(self._answer) >= n and (places := self._places.get(tuple(self._answer[-n:]))):
                left = self._next or 0
                return next((end for end in places if end > left), places[-1])
        return None
