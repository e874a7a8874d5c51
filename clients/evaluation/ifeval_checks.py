"""The 25 kinds of instructions of IFEval (Zhou et al., 2023, arXiv 2311.07911), each as a strict check of a response.

Strict: the response is taken as it is. Where the paper leaves room, the published scorer decides, so that scores can be
compared with published ones. Knows nothing of servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hamburger.clients.evaluation.errors import EvalError
from hamburger.clients.evaluation.ifeval_text import TextTools, count_capital_words, count_words

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def follows(tools: TextTools, instruction: str, arguments: Mapping[str, Any], response: str) -> bool:
    """Whether `response` follows one instruction. An empty response follows none. `arguments`: see read_arguments."""
    return bool(response.strip()) and _CHECKS[instruction][0](tools, response, **arguments)


def read_arguments(instruction: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an instruction from its row, without the null ones of some copies of the data.

    Raises EvalError for an instruction or an argument that is unknown, missing or of the wrong kind.
    """
    if instruction not in _CHECKS:
        raise EvalError(f"instruction_id_list names {instruction!r}: the 25 known ones are {', '.join(_CHECKS)}.")
    kinds = _CHECKS[instruction][1]
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in sorted(given.keys() | kinds.keys()):
        if name not in kinds:
            raise EvalError(f"kwargs of {instruction} holds {name!r}: remove it, known are {sorted(kinds) or 'none'}.")
        remedy, fits = kinds[name]
        if name not in given or not fits(given[name]):
            raise EvalError(f"kwargs of {instruction}: {name} is {given.get(name)!r}, write {remedy} instead.")
    return given


def _compare(number: int, relation: str, bound: int) -> bool:
    return number < bound if relation == "less than" else number >= bound


def _keywords(_: TextTools, text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def _keyword_frequency(_: TextTools, text: str, relation: str, keyword: str, frequency: int) -> bool:
    return _compare(len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)), relation, frequency)


def _forbidden_words(_: TextTools, text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(_: TextTools, text: str, let_relation: str, letter: str, let_frequency: int) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _language(tools: TextTools, text: str, language: str) -> bool:
    return tools.language(text) in (language, None)  # a text that tells no language breaks no rule


def _num_paragraphs(_: TextTools, text: str, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1]
    return all(inner) and sum(map(bool, parts)) == num_paragraphs


def _num_words(_: TextTools, text: str, relation: str, num_words: int) -> bool:
    return _compare(count_words(text), relation, num_words)


def _num_sentences(tools: TextTools, text: str, relation: str, num_sentences: int) -> bool:
    return _compare(tools.count_sentences(text), relation, num_sentences)


def _first_word(_: TextTools, text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in text.split("\n\n")]
    if sum(map(bool, parts)) != num_paragraphs or nth_paragraph > num_paragraphs or not parts[nth_paragraph - 1]:
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _postscript(_: TextTools, text: str, postscript_marker: str) -> bool:
    pattern = _POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker))
    return re.search(pattern, text, re.IGNORECASE) is not None


def _placeholders(_: TextTools, text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _bullets(_: TextTools, text: str, num_bullets: int) -> bool:
    starred = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    dashed = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(starred) + len(dashed) == num_bullets


def _constrained(_: TextTools, text: str) -> bool:
    return any(answer in text for answer in _ANSWERS)


def _highlights(_: TextTools, text: str, num_highlights: int) -> bool:
    found = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in found) >= num_highlights


def _sections(_: TextTools, text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def _json(_: TextTools, text: str) -> bool:
    inner = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        inner = inner.removeprefix(fence)
    try:
        json.loads(inner.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(_: TextTools, text: str) -> bool:
    return any(found.lstrip("<").rstrip(">").strip() for found in re.findall(r"<<[^\n]+>>", text))


def _two_responses(_: TextTools, text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _repeat_prompt(_: TextTools, text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(_: TextTools, text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(_: TextTools, text: str) -> bool:
    inner = text.strip()
    return len(inner) > 1 and inner[0] == inner[-1] == '"'


def _capital_words(_: TextTools, text: str, capital_relation: str, capital_frequency: int) -> bool:
    return _compare(count_capital_words(text), capital_relation, capital_frequency)


def _capitals(tools: TextTools, text: str) -> bool:
    return text.isupper() and tools.language(text) in ("en", None)


def _lowercase(tools: TextTools, text: str) -> bool:
    return text.islower() and tools.language(text) in ("en", None)


def _no_comma(_: TextTools, text: str) -> bool:
    return "," not in text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


_Kind = tuple[str, Callable[[Any], bool]]
_NUMBER: _Kind = ("a whole number from 0 up", lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0)
_POSITIVE: _Kind = ("a whole number from 1 up", lambda v: _NUMBER[1](v) and v > 0)
_TEXT: _Kind = ("some text", _is_text)
_LETTER: _Kind = ("one character", lambda v: _is_text(v) and len(v) == 1)
_WORDS: _Kind = ("a list of words", lambda v: isinstance(v, list) and bool(v) and all(map(_is_text, v)))
_RELATION: _Kind = ('"at least" or "less than"', lambda v: v in ("at least", "less than"))

_CHECKS: dict[str, tuple[Callable[..., bool], dict[str, _Kind]]] = {
    "keywords:existence": (_keywords, {"keywords": _WORDS}),
    "keywords:frequency": (_keyword_frequency, {"relation": _RELATION, "keyword": _TEXT, "frequency": _NUMBER}),
    "keywords:forbidden_words": (_forbidden_words, {"forbidden_words": _WORDS}),
    "keywords:letter_frequency": (
        _letter_frequency,
        {"let_relation": _RELATION, "letter": _LETTER, "let_frequency": _NUMBER},
    ),
    "language:response_language": (_language, {"language": _TEXT}),
    "length_constraints:number_paragraphs": (_num_paragraphs, {"num_paragraphs": _NUMBER}),
    "length_constraints:number_words": (_num_words, {"relation": _RELATION, "num_words": _NUMBER}),
    "length_constraints:number_sentences": (_num_sentences, {"relation": _RELATION, "num_sentences": _NUMBER}),
    "length_constraints:nth_paragraph_first_word": (
        _first_word,
        {"num_paragraphs": _NUMBER, "nth_paragraph": _POSITIVE, "first_word": _TEXT},
    ),
    "detectable_content:postscript": (_postscript, {"postscript_marker": _TEXT}),
    "detectable_content:number_placeholders": (_placeholders, {"num_placeholders": _NUMBER}),
    "detectable_format:number_bullet_lists": (_bullets, {"num_bullets": _NUMBER}),
    "detectable_format:constrained_response": (_constrained, {}),
    "detectable_format:number_highlighted_sections": (_highlights, {"num_highlights": _NUMBER}),
    "detectable_format:multiple_sections": (_sections, {"section_spliter": _TEXT, "num_sections": _NUMBER}),
    "detectable_format:json_format": (_json, {}),
    "detectable_format:title": (_title, {}),
    "combination:two_responses": (_two_responses, {}),
    "combination:repeat_prompt": (_repeat_prompt, {"prompt_to_repeat": _TEXT}),
    "startend:end_checker": (_end, {"end_phrase": _TEXT}),
    "startend:quotation": (_quotation, {}),
    "change_case:capital_word_frequency": (
        _capital_words,
        {"capital_relation": _RELATION, "capital_frequency": _NUMBER},
    ),
    "change_case:english_capital": (_capitals, {}),
    "change_case:english_lowercase": (_lowercase, {}),
    "punctuation:no_comma": (_no_comma, {}),
}
