"""Reasoning: what a model writes for itself before it answers, apart from the answer. Text in, text out; no HTTP.

<think> reasoning </think> answer          also without the first marker, where the prompt ends with it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import ThinkingBudget
from hamburger.server.server_tokenizer import ServerTokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Markers(NamedTuple):
    begin: str
    end: str


_KNOWN = (Markers("<think>", "</think>"), Markers("[THINK]", "[/THINK]"))


def markers_of(tokenizer: ServerTokenizer) -> Markers | None:
    """Those that the chat template shows; None where it shows none, or where they are special tokens, which no text
    has."""
    for markers in _KNOWN:
        if markers.end in (tokenizer.chat_template or ""):
            found = [tokenizer.encode(marker) for marker in markers]
            return None if any(len(ids) == 1 and tokenizer.is_special(ids[0]) for ids in found) else markers
    return None


def marker_ids(tokenizer: ServerTokenizer, markers: Markers) -> tuple[int, int] | None:
    """Of markers that are one token each."""
    begin, end = (tokenizer.encode(marker) for marker in markers)
    return (begin[0], end[0]) if len(begin) == len(end) == 1 else None


def template_kwargs(template: str | None, effort: str | None, enabled: bool | None) -> Mapping[str, Any]:
    """What the template is told of thinking. Raises InvalidRequest for a wish that it does not read.

    effort: one of EFFORTS. enabled: whether to think at all.
    """
    told: dict[str, Any] = {}
    read = template or ""
    if enabled is not None:
        if "enable_thinking" not in read:
            raise InvalidRequest("The model's chat template does not read enable_thinking.", "enable_thinking")
        told["enable_thinking"] = enabled
    if effort is not None:
        if "reasoning_effort" in read:
            told["reasoning_effort"] = effort
        elif "enable_thinking" in read:
            told.setdefault("enable_thinking", effort != "none")
        elif effort != "none":
            raise InvalidRequest(
                "The model's chat template reads neither 'reasoning_effort' nor 'enable_thinking': leave it out.",
                "reasoning_effort",
            )
    return told


def thinking_budget(tokenizer: ServerTokenizer, markers: Markers | None, prompt: str, tokens: int) -> ThinkingBudget:
    """prompt: as the chat template wrote it. Raises InvalidRequest for a model whose markers are not one token each."""
    ids = None if markers is None else marker_ids(tokenizer, markers)
    if markers is None or ids is None:
        raise InvalidRequest(
            "The model keeps no budget of thinking, as it has no tokens that begin and end it: leave it out.",
            "thinking_token_budget",
        )
    begin, end = ids
    return ThinkingBudget(tokens, None if _has_begun(markers, prompt) else begin, end)


def _has_begun(markers: Markers, prompt: str) -> bool:
    return prompt.rstrip().endswith(markers.begin)


def unwritten(markers: Markers, prompt: str) -> Markers:
    """What the model is yet to write of them: an empty first one where the prompt has begun the reasoning."""
    return markers._replace(begin="") if _has_begun(markers, prompt) else markers


class Reasoning:
    """Splits one answer as it comes. White space beside the markers belongs to neither part.

    answer_from: the character at which the answer begins, once it has.
    """

    def __init__(self, markers: Markers, prompt: str, ids: tuple[int, int] | None = None) -> None:
        """prompt: as the chat template wrote it; one that ends with the first marker has begun the reasoning. ids: of
        the markers, where they are one token each."""
        self._markers, self._ids = markers, ids
        self._has_begun = self._is_inside = _has_begun(markers, prompt)
        self._state = "opened" if self._has_begun else "before"
        self._held = ""
        self.answer_from = self._num_chars = 0
        self._num_tokens, self._has_ended = 0, False  # by the tokens

    def count(self, token_ids: Sequence[int]) -> None:
        """New tokens of the answer, before their text is added."""
        begin, end = self._ids or (None, None)
        for token_id in token_ids if not self._has_ended else ():
            if not self._is_inside:
                self._is_inside = token_id == begin
            elif token_id == end:
                self._has_ended = True
                return
            else:
                self._num_tokens += 1

    @property
    def num_tokens(self) -> int | None:
        """Tokens between the markers, of what was added; None where these are no tokens of their own."""
        if self._ids is None:
            return None
        return self._num_tokens if self._has_begun else 0  # a marker in the midst of an answer begins none

    def add(self, text: str, *, is_final: bool) -> tuple[str, str]:
        """What new text adds to the reasoning and to the answer. is_final: no more comes."""
        self._held += text
        self._num_chars += len(text)
        was_answer = self._state == "answer"
        reasoning = content = ""
        if self._state == "before":
            begun = self._held.lstrip()
            if begun.startswith(self._markers.begin):
                self._state, self._held = "opened", begun[len(self._markers.begin) :]
                self._has_begun = True
            elif is_final or not self._markers.begin.startswith(begun):
                self._state = "answer"
        if self._state == "opened":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "inside"
        if self._state == "inside":
            found, end, rest = self._held.partition(self._markers.end)
            if end:
                reasoning, self._state, self._held = found.rstrip(), "behind", rest
            else:
                kept = 0 if is_final else _held_back(found, self._markers.end)
                reasoning = found[: len(found) - kept]
                self._held = found[len(found) - kept :]
        if self._state == "behind":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
        if self._state == "answer":
            if not was_answer:
                self.answer_from = self._num_chars - len(self._held)
            content, self._held = self._held, ""
        return reasoning, content


def _held_back(text: str, marker: str) -> int:
    """How many of the last characters may be white space before the marker, or its beginning."""
    begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
