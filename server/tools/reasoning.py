"""Reasoning: what a model writes for itself before it answers, apart from the answer. Text in, text out; no HTTP.

<think> reasoning </think> answer          also without the first marker, where the prompt ends with it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import ThinkingBudget
from hamburger.server.server_tokenizer import ServerTokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


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
                "The model's chat template reads neither reasoning_effort nor enable_thinking: leave it out.",
                "reasoning_effort",
            )
    return told


def thinking_budget(tokenizer: ServerTokenizer, markers: Markers | None, prompt: str, tokens: int) -> ThinkingBudget:
    """prompt: as the chat template wrote it. Raises InvalidRequest for a model whose markers are not one token each."""
    ids = [] if markers is None else [tokenizer.encode(marker) for marker in markers]
    if markers is None or any(len(marker) != 1 for marker in ids):
        raise InvalidRequest(
            "The model keeps no budget of thinking, as it has no tokens that begin and end it: leave it out.",
            "thinking_token_budget",
        )
    [begin], [end] = ids
    return ThinkingBudget(tokens, None if _has_begun(markers, prompt) else begin, end)


def _has_begun(markers: Markers, prompt: str) -> bool:
    return prompt.rstrip().endswith(markers.begin)


class Reasoning:
    """Splits one answer as it comes. White space beside the markers belongs to neither part."""

    def __init__(self, markers: Markers, prompt: str) -> None:
        """prompt: as the chat template wrote it; one that ends with the first marker has begun the reasoning."""
        self._markers = markers
        self._state = "opened" if _has_begun(markers, prompt) else "before"
        self._held = ""

    def add(self, text: str, *, is_final: bool) -> tuple[str, str]:
        """What new text adds to the reasoning and to the answer. is_final: no more comes."""
        self._held += text
        reasoning = content = ""
        if self._state == "before":
            begun = self._held.lstrip()
            if begun.startswith(self._markers.begin):
                self._state, self._held = "opened", begun[len(self._markers.begin) :]
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
            content, self._held = self._held, ""
        return reasoning, content


def _held_back(text: str, marker: str) -> int:
    """How many of the last characters may be white space before the marker, or its beginning."""
    begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
