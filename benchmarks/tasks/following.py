"""Whether an answer follows IFEval's instructions (arXiv 2311.07911), of those that a few lines can check."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]


def share_followed(answer: str, instructions: list[str], fields: list[Fields]) -> float | None:
    """The share of the instructions that the answer follows; None where none of them can be checked here."""
    found = [CHECKS[name](answer, given) for name, given in zip(instructions, fields, strict=True) if name in CHECKS]
    return sum(found) / len(found) if found else None


def _related(number: int, wanted: int, relation: str) -> bool:
    return number < wanted if relation == "less than" else number >= wanted


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _times(text: str, word: str) -> int:
    return len(re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE))


def _is_json(text: str) -> bool:
    bare = re.sub(r"^```(json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(bare)
    except ValueError:
        return False
    return True


def _quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


CHECKS: dict[str, Callable[[str, Fields], bool]] = {
    "punctuation:no_comma": lambda text, f: "," not in text,
    "length_constraints:number_words": lambda text, f: _related(len(_words(text)), f["num_words"], f["relation"]),
    "length_constraints:number_sentences": lambda text, f: _related(
        len(re.findall(r"[.!?]+(?:\s|$)", text)), f["num_sentences"], f["relation"]
    ),
    "length_constraints:number_paragraphs": lambda text, f: (
        len([part for part in re.split(r"\s*\*\*\*\s*", text) if part.strip()]) == f["num_paragraphs"]
    ),
    "keywords:existence": lambda text, f: all(_times(text, word) for word in f["keywords"]),
    "keywords:forbidden_words": lambda text, f: not any(_times(text, word) for word in f["forbidden_words"]),
    "keywords:frequency": lambda text, f: _related(_times(text, f["keyword"]), f["frequency"], f["relation"]),
    "keywords:letter_frequency": lambda text, f: _related(
        text.lower().count(f["letter"].lower()), f["let_frequency"], f["let_relation"]
    ),
    "detectable_format:number_highlighted_sections": lambda text, f: (
        len(re.findall(r"\*[^\n*]+\*", text)) >= f["num_highlights"]
    ),
    "detectable_format:number_bullet_lists": lambda text, f: (
        len(re.findall(r"^\s*[*-]\s", text, re.MULTILINE)) == f["num_bullets"]
    ),
    "detectable_format:title": lambda text, f: re.search(r"<<[^\n]+>>", text) is not None,
    "detectable_format:json_format": lambda text, f: _is_json(text),
    "detectable_content:number_placeholders": lambda text, f: (
        len(re.findall(r"\[[^\]\n]+\]", text)) >= f["num_placeholders"]
    ),
    "detectable_content:postscript": lambda text, f: f["postscript_marker"].lower() in text.lower(),
    "change_case:english_lowercase": lambda text, f: text == text.lower(),
    "change_case:english_capital": lambda text, f: text == text.upper(),
    "startend:quotation": lambda text, f: _quoted(text),
    "startend:end_checker": lambda text, f: text.strip().lower().endswith(f["end_phrase"].strip().lower()),
}
