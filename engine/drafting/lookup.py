"""Drafts without a model: what followed the newest tokens where they came before. For every base model.

`Lookup` searches prompt and answer; `Prediction` follows a text that the client expects, and finds its way back to it
after a change. A token costs a few microseconds, whatever the texts are. A long one is learnt in parts, each less than
a millisecond, as this happens between two steps, where all requests wait for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

_LONGEST = 4  # tokens that are compared; two of them must have come before
_MOST_PLACES = 16  # that are compared
_AT_ONCE = 1024  # tokens that are learnt in one go


class Lookup:
    """N-grams of a growing text: prompt lookup decoding (Saxena 2023). The longest counts, of equals the newest."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = list(token_ids)
        self._ends: dict[tuple[int, int], int] = {}  # where two tokens ended last
        self._before = [0, 0]  # for each place, where the two tokens that end there ended before; 0: nowhere

    def extend(self, token_ids: Sequence[int]) -> None:
        self._text += token_ids

    def after(self, most: int) -> list[int]:
        """At most so many tokens that may come next."""
        self._learn()
        places, text = list[int](), self._text
        end = self._ends.get((text[-2], text[-1]), 0) if len(text) > 1 else 0
        while end and len(places) < _MOST_PLACES:
            places.append(end)
            end = self._before[end]
        found = _best(text, places, text[-_LONGEST:])
        if found is None:
            return []
        period = len(text) - found  # what ends the text may go on as it did
        return [text[found + i % period] for i in range(most)]

    def _learn(self) -> None:
        text, ends, before = self._text, self._ends, self._before
        # What ends with the newest token must not find itself.
        for end in range(len(before), min(len(text), len(before) + _AT_ONCE)):
            gram = text[end - 2], text[end - 1]
            before.append(ends.get(gram, 0))
            ends[gram] = end


class Prediction:
    """A text that the answer is expected to follow, if with changes."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = list(token_ids)
        self._num_learnt = 1
        self._places: dict[tuple[int, int], list[int]] = {}  # where two tokens end, in order
        self._answer: list[int] = []
        self._next = 0  # where the answer is; where it was left while it is lost
        self._is_lost = False

    def extend(self, token_ids: Sequence[int]) -> None:
        self._learn()
        for token_id in token_ids:
            self._answer = [*self._answer[1 - _LONGEST :], token_id]
            if not self._is_lost and self._next < len(self._text) and self._text[self._next] == token_id:
                self._next += 1
            else:
                found = self._found_again()
                self._is_lost = found is None
                self._next = self._next if found is None else found

    def after(self, most: int) -> list[int]:
        """At most so many tokens that may come next."""
        return [] if self._is_lost else self._text[self._next : self._next + most]

    def _found_again(self) -> int | None:
        """Behind the longest end of the answer that the text has, the first of them from where it was left on."""
        if len(self._answer) < 2:
            return None
        places = self._places.get((self._answer[-2], self._answer[-1]), [])
        at = bisect_right(places, self._next)
        ahead, behind = places[at : at + _MOST_PLACES], places[max(at - _MOST_PLACES, 0) : at]
        return _best(self._text, [*ahead, *reversed(behind)], self._answer)

    def _learn(self) -> None:
        text, start = self._text, self._num_learnt + 1
        self._num_learnt = min(len(text), self._num_learnt + _AT_ONCE)
        for end in range(start, self._num_learnt + 1):
            self._places.setdefault((text[end - 2], text[end - 1]), []).append(end)


def _best(text: Sequence[int], places: Iterable[int], newest: Sequence[int]) -> int | None:
    """The first place behind which most of the newest tokens stand; two do at each. None where there is no place."""
    found, longest = None, 0
    for end in places:
        same = 2
        while same < min(len(newest), end) and text[end - same - 1] == newest[-same - 1]:
            same += 1
        if same > longest:
            found, longest = end, same
    return found
