"""GBNF in llguidance's Lark: rules of characters alone leave what follows them its beginning."""

from __future__ import annotations

import pytest

from byte_grammars import takes
from hamburger.engine.grammar.gbnf import lark_of
from hamburger.engine.grammar.writing import context_free_grammar


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ('root ::= "a" ws "\\n" "b"\nws ::= [ \\n]*', ["a\nb", "a \n\nb"], ["ab", "a b"]),
        ('root ::= "a" ws "\\n  b"\nws ::= [ \\n]*', ["a\n  b", "a \n\n  b", "a\n \n  b"], ["a b"]),
        ('root ::= word "ab"\nword ::= [a-z]+', ["xab", "abab", "xabab", "xabxab"], ["ab", "xyz"]),
        ('root ::= word "ab" word\nword ::= [a-z]+', ["xabx", "xabxab"], ["xab"]),
        ('root ::= some "b"\nsome ::= "a" | "ab"', ["ab", "abb"], ["a", "abbb"]),
        ('root ::= some "b"\nsome ::= "a" more\nmore ::= "" | "b"', ["ab", "abb"], ["a", "abbb"]),
        ('root ::= word end\nword ::= [a-z]*\nend ::= "z" [a-z]', ["aza", "zzz", "azz"], ["az", "aa"]),
        ('root ::= number ("." number)?\nnumber ::= [0-9.]+', ["1.2", "1"], ["", "a"]),
        ('root ::= word{2}\nword ::= [a-z]+', ["ab", "abc"], ["a"]),
        ('root ::= text "\\x00"\ntext ::= [\\x00-\\x1f]*', ["\0", "\1\0", "\0\0"], ["", "\1"]),
        ('root ::= (text ".")+\ntext ::= [^ ]*', ["a.", "a.b.", ".."], ["a", " ."]),
    ],
)  # fmt: skip
def test_a_rule_of_characters_leaves_what_follows_its_beginning(
    grammar: str, allowed: list[str], refused: list[str]
) -> None:
    written = context_free_grammar(grammar)
    assert [text for text in allowed if not takes(written, text)] == []
    assert [text for text in refused if takes(written, text)] == []


JSON = r"""root ::= object
value ::= object | string | number | ("true" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_where_nothing_is_taken_rules_of_characters_are_terminals() -> None:
    """Which are matched in a fraction of the time."""
    lark = lark_of(JSON)
    assert [name in lark for name in ("\nSTRING: ", "\nNUMBER: ", "\nWS: ", '"true"')] == [True] * 4


def test_rules_that_lead_to_two_others_each_are_followed_once() -> None:
    """2 ** 200 ways lead through these."""
    rules = [f'r{i} ::= [a-z]+ r{i + 1} | "x" r{i + 1}?' for i in range(200)]
    assert "R200: " in lark_of("\n".join(["root ::= r0", *rules, "r200 ::= [0-9]+"]))


def test_rules_that_lead_to_hundreds_of_others_are_a_grammar() -> None:
    number = 300
    chain = "".join(f"a{i} ::= [a-z]* a{i + 1}\n" for i in range(number))
    written = lark_of(f"root ::= a0\n{chain}a{number} ::= [a-z]*\n")
    assert written.endswith(f"A{number - 1}: /[a-z]/* A{number}\nA{number}: /[a-z]/*\n")
