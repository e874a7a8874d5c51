"""StopStrings: several strings, found in streams of text by one automaton that all answers of a request share."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """An automaton of Aho and Corasick (1975): a character costs about the same, however many strings there are.

    A state is what the text so far ends with, as far as that begins one of the strings; 0 at first.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Raises ValueError for an empty string. Takes about a microsecond a character."""
        if not all(strings):
            raise ValueError("stop holds an empty string")
        self._next: list[dict[str, int]] = [{}]
        self._found = [0]  # how long the longest of the strings is that ends here; 0: none does
        for string in strings:
            state = 0
            for char in string:
                state = self._next[state].setdefault(char, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self._found.append(0)
            self._found[state] = len(string)
        self._firsts = frozenset(self._next[0])
        self._fallback = [0] * len(self._next)  # the longest other state that the text ends with too
        self._held = [0] * len(self._next)  # characters that may yet become one of the strings
        self._link()

    def feed(self, state: int, text: str) -> tuple[int, tuple[int, int] | None]:
        """The state behind more text, and where in it the first string ends, and how long it is: of those that end
        there the longest. None where none ends."""
        if not state and self._firsts.isdisjoint(text):
            return 0, None
        found: tuple[int, int] | None = None
        for i, char in enumerate(text, 1):
            state = self._step(state, char)
            if found is None and self._found[state]:
                found = i, self._found[state]
        return state, found

    def held(self, state: int) -> int:
        """How many of the newest characters begin one of the strings, which is not yet whole."""
        return self._held[state]

    def _step(self, state: int, char: str) -> int:
        while (found := self._next[state].get(char)) is None and state:
            state = self._fallback[state]
        return found or 0

    def _link(self) -> None:
        """Breadth first: what a state falls back to is nearer to the first."""
        states = [(state, 1) for state in self._next[0].values()]
        for state, depth in states:
            fallback = self._fallback[state]
            self._found[state] = self._found[state] or self._found[fallback]
            self._held[state] = depth if self._next[state] else self._held[fallback]
            for char, behind in self._next[state].items():
                self._fallback[behind] = self._step(fallback, char)
                states.append((behind, depth + 1))
