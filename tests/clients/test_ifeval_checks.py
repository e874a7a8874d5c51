"""Every kind of IFEval instruction: responses that follow it and responses that do not."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hamburger.clients.evaluation.errors import EvalError
from hamburger.clients.evaluation.ifeval_checks import _CHECKS, follows, read_arguments
from hamburger.clients.evaluation.ifeval_text import TextTools, count_capital_words, count_words

ROWS = Path(__file__).parents[1] / "data" / "eval" / "ifeval.jsonl.gz"
GERMAN = "Das Wetter ist heute sehr schön, und wir gehen am Nachmittag mit den Kindern in den Park."
ENGLISH = "The weather is very nice today, and this afternoon we will walk to the park with the children."
P1, P2, P3 = "One is here.", "Two is there.", "Three is gone."

# instruction, arguments, responses that follow it, responses that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["sea", "C++"]},
        ["The SEA and c++.", "A season of C++"],  # inside a word counts, as in the published scorer
        ["The sea.", "The sea and C", ""],
    ),
    (
        "keywords:frequency",
        {"relation": "at least", "keyword": "fish", "frequency": 2},
        ["Fish eat fish.", "Fishing for fish."],
        ["One fish."],
    ),
    (
        "keywords:frequency",
        {"relation": "less than", "keyword": "fish", "frequency": 2},
        ["One fish."],
        ["Fish, fish."],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["bad", "worse"]}, ["A badge."], ["Too Bad.", "worse and worse"]),
    (
        "keywords:letter_frequency",
        {"let_relation": "at least", "letter": "Q", "let_frequency": 2},
        ["Quite quick"],
        ["Quite so"],
    ),
    ("keywords:letter_frequency", {"let_relation": "less than", "letter": "!", "let_frequency": 1}, ["No."], ["Yes!"]),
    ("language:response_language", {"language": "de"}, [GERMAN, "12345"], [ENGLISH]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        [f"{P1}\n***\n{P2}", f"***\n{P1}\n\n***\n\n{P2}\n***"],
        [P1, f"{P1}\n\n{P2}", f"{P1}\n***\n***\n{P2}", f"{P1} *** {P2} *** {P3}"],
    ),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, ["one, two-three"], ["one two"]),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, ["one two"], ["one two three"]),
    (
        "length_constraints:number_sentences",
        {"relation": "at least", "num_sentences": 2},
        ["Dr. Smith went home. He slept!"],
        ["Dr. Smith went home at 5 p.m. to sleep.", "a list\nwithout\nends"],
    ),
    ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 2}, [P1], [f"{P1} {P2}"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "two"},
        [f"{P1}\n\n{P2}\n\n{P3}", f'{P1}\n\n"TWO", he said.\n\n{P3}'],
        [f"{P1}\n\n{P3}\n\n{P2}", f"{P1}\n\n{P2}", f"{P1}\n\n{P2}\n\n{P3}\n\n{P3}", f"{P1}\n\n\n\n{P2}\n\n{P3}"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP.S. More.", "p. s. more"], ["PS more"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye.\nP. P. S more"], ["Bye.\nP.S. more"]),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["n.b. more"], ["NXBX more"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["Dear [name], [date]"], ["Dear [name\n], [x"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["Two:\n* one\n* two", "- one\n  - two\n**bold**"],
        ["* one", "* one\n* two\n- three"],
    ),
    ("detectable_format:constrained_response", {}, ["My answer is maybe."], ["My answer is: no.", "Yes."]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and *two*", "*a* **b**"],
        ["*one*", "* * and *one*", "*one\ntwo* *"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection2\nb", "Section 1 Section 2 Section 3"],
        ["Section 1\na", "SECTION 1\nSECTION 2", "Section one, Section two"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[1, 2]\n```"],
        ["{'a': 1}", 'Here: {"a": 1}', "[" * 100_000],
    ),
    ("detectable_format:title", {}, ["<<A title>>\ntext", "so <<<this>>>"], ["<title>", "<<>>", "<< >>", "<<a\nb>>"]),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******one******two******"],
        ["one", "one ****** one", "one******two******three", "one****** ******two"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem. "},
        ["write a POEM.\nRoses", "  Write a poem."],
        ["Sure! Write a poem.", "Write a song."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ["Yes. THAT is all. ", '"That is all."'],
        ["That is all. OK"],
    ),
    ("startend:quotation", {}, ['"quoted"', ' "a\nb" '], ['"', 'say "this"', "'quoted'", "“quoted”"]),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 3},
        ["NASA and ESA, I", "A COVID-19 AND/OR test"],
        ["NASA and Esa, I", "nothing"],
    ),
    ("change_case:capital_word_frequency", {"capital_relation": "less than", "capital_frequency": 1}, ["No"], ["NO"]),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, GERMAN.upper(), "123"]),
    ("change_case:english_lowercase", {}, [ENGLISH.lower()], [ENGLISH, GERMAN.lower(), "123"]),
    ("punctuation:no_comma", {}, ["No; none."], ["Yes, one."]),
]


@pytest.fixture(scope="module")
def tools() -> TextTools:
    return TextTools()


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), CASES)
def test_responses_follow_or_do_not(
    tools: TextTools, instruction: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    read = read_arguments(instruction, arguments)
    assert [response for response in good if not follows(tools, instruction, read, response)] == []
    assert [response for response in bad if follows(tools, instruction, read, response)] == []


def test_every_instruction_has_a_case_and_is_in_the_data(tools: TextTools) -> None:
    rows = [json.loads(line) for line in gzip.decompress(ROWS.read_bytes()).splitlines()]
    pairs = [pair for row in rows for pair in zip(row["instruction_id_list"], row["kwargs"], strict=True)]
    assert {name for name, _ in pairs} == {name for name, *_ in CASES} == set(_CHECKS)
    assert len(_CHECKS) == 25
    for name, arguments in pairs:
        assert follows(tools, name, read_arguments(name, arguments), " \n") is False


def test_languages_repeat_and_leave_langdetect_itself_alone() -> None:
    from langdetect import detector_factory  # type: ignore[import-untyped]

    texts = ["la la ja no si", "mi tu", "in de", "a la carte", "no", "ja so", "e o", "via mare", "son", "man"]

    def detected(seed: int) -> list[str | None]:
        tools = TextTools(seed)
        return [tools.language(text) for text in texts]

    assert detected(1) == detected(1) != detected(2)
    assert detector_factory.DetectorFactory.seed is None
    assert detector_factory._factory is None


def test_words() -> None:
    assert count_words("It's 10_000 well-known—words.") == 6
    text = "U.S. AND/OR COVID-19... DON'T cannot CANNOT (NASA)--ESA's “OK” **BOLD** I'm 3:4"
    assert count_capital_words(text) == len(
        ["U.S.", "AND/OR", "COVID-19", "DO", "N'T", "CAN", "NOT", "NASA", "ESA", "OK", "BOLD", "I"]
    )


def test_wrong_rows_are_named_with_their_remedy() -> None:
    with pytest.raises(EvalError, match=r"names 'keywords:exist': the 25 known ones are keywords:existence"):
        read_arguments("keywords:exist", {})
    with pytest.raises(EvalError, match=r"num_words is None, write a whole number"):
        read_arguments("length_constraints:number_words", {"relation": "at least"})
    with pytest.raises(EvalError, match=r"relation is 'around', write \"at least\" or \"less than\""):
        read_arguments("length_constraints:number_words", {"relation": "around", "num_words": 3})
    with pytest.raises(EvalError, match=r"holds 'colour': remove it, known are \['num_bullets'\]"):
        read_arguments("detectable_format:number_bullet_lists", {"num_bullets": 1, "colour": "red"})
    arguments = {"num_paragraphs": 1, "nth_paragraph": 0, "first_word": "a"}
    with pytest.raises(EvalError, match=r"nth_paragraph is 0, write a whole number from 1 up"):
        read_arguments("length_constraints:nth_paragraph_first_word", arguments)
    with pytest.raises(EvalError, match="keywords is 'sea', write a list of words"):
        read_arguments("keywords:existence", {"keywords": "sea"})
    assert read_arguments("punctuation:no_comma", {"num_words": None}) == {}  # some copies name all arguments


@pytest.mark.parametrize("module", ["langdetect", "punkt"])
def test_a_missing_package_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EvalError, match=rf"{module}: install it with pip install 'hamburger-serve\[eval\]'"):
        TextTools()
