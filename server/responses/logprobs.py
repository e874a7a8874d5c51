"""TextLogprobs: of an answer's log-probabilities those of its output text, as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hamburger.server.completions.logprobs import TextOffsets


class TextLogprobs:
    """What a model thinks before its text has none, nor has what is behind the first call. Tokens wait until their text
    is told."""

    def __init__(self, offsets: TextOffsets) -> None:
        """offsets: of the answer's tokens."""
        self._offsets = offsets
        self._waiting: deque[tuple[int, int, dict[str, Any]]] = deque()  # where it starts and ends, its entry
        self._size = 0  # of the text that was told

    def add(self, token_ids: Sequence[int], entries: Sequence[dict[str, Any]]) -> None:
        """Those of the answer's next tokens."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            start = self._offsets.next(token_id)
            self._waiting.append((start, self._offsets.num_chars, entry))

    def of(self, text: str, text_from: int) -> list[dict[str, Any]]:
        """Those of the next characters of the text, which begins at a character of the answer."""
        self._size += len(text)
        taken = []
        while self._waiting and self._waiting[0][0] < text_from + self._size:
            start, end, entry = self._waiting.popleft()
            if end > text_from or start == text_from:
                taken.append(entry)
        return taken

    def of_whole(self, text: str, text_from: int, answer: str, *, has_calls: bool) -> list[dict[str, Any]]:
        """Those of a text that is complete: before calls of as much of it as the answer begins with, else of all, and
        of what ended it."""
        if not has_calls:
            return self.of(text, text_from) + self.rest()
        pairs = zip(text, answer[text_from:], strict=False)
        before = next((i for i, (told, written) in enumerate(pairs) if told != written), len(text))
        return self.of(text[:before].rstrip(), text_from)

    def rest(self) -> list[dict[str, Any]]:
        """Those of the tokens behind all text, which ended it."""
        entries = [entry for *_, entry in self._waiting]
        self._waiting.clear()
        return entries
